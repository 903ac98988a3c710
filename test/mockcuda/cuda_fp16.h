// The halves of CUDA C, as far as kernels here use them. Stands in for the toolkit's header of this name.
#pragma once
#if __clang_major__ < 16
typedef __fp16 half;      // with -fnative-half-type: every operation rounds
#else
typedef _Float16 half;
#endif
VECTORS(half)
static inline half hexp2(half x) { return (half)exp2((float)x); }
static inline half hlog2(half x) { return (half)log2((float)x); }
static inline half hsin(half x) { return (half)sin((float)x); }
static inline half hsqrt(half x) { return (half)sqrt((float)x); }
static inline half hrcp(half x) { return (half)(1.0f / (float)x); }
static inline half htrunc(half x) { return (half)trunc((float)x); }
static inline half2 __hfma2(half2 a, half2 b, half2 c) { return {(half)((float)a.x * (float)b.x + (float)c.x), (half)((float)a.y * (float)b.y + (float)c.y)}; }
// mock_mma on words of two halves
template <int K, class... W> static inline void mock_mma_words(float& c0, float& c1, float& c2, float& c3, W... words) {
  struct Halves { half x, y; };
  struct A { half x; char rest[K - 2]; } a;
  struct B { half x; char rest[K / 2 - 2]; } b;
  struct { float v[4]; } c = {c0, c1, c2, c3};
  unsigned all[] = {(unsigned)words...};
  __builtin_memcpy(&a, all, sizeof a);
  __builtin_memcpy(&b, (char*)all + sizeof a, sizeof b);
  c = mock_mma<K>(a, b, c);
  c0 = c.v[0], c1 = c.v[1], c2 = c.v[2], c3 = c.v[3];
}
