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
// wgmma.m64nNk16 of a warp's 16 rows: a as mma.sync has it, b's 16 numbers of each column where a swizzle of 128 bytes puts them. Nothing is read in
// shared memory, or added, before the thread waits: the latest that a card does it
struct GroupProduct { unsigned a[32][4]; const char* b; };
extern "C" GroupProduct* mock_group_begin(float** sums, int count);
extern "C" void mock_group_finish(void (*add)(const GroupProduct&, float**, int, int));
static inline void mock_group_add(const GroupProduct& product, float** sums, int count, int lane) {
  for (int i = 0; i < count; i++) for (int k = 0; k < 16; k++) {
    int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    auto* x = (const half*)product.a[row % 8 * 4 + k % 8 / 2];
    unsigned long long at = (unsigned long long)product.b + column * 128 + k * 2;
    *sums[i] += (float)x[k % 2 + row / 8 * 2 + k / 8 * 4] * (float)*(const half*)(at ^ (at >> 7 & 7) << 4);
  }
}
static inline void mock_group_wait() { mock_group_finish(mock_group_add); }
template <class... T> static inline void mock_group_mma(T&&... operands) {
  const int count = sizeof...(T) - 5;
  float* sums[count];
  unsigned a[4];
  const char* b;
  int i = 0;
  auto take = [&](auto& operand) {
    if constexpr (__is_same(decltype(operand), float&)) sums[i] = &operand;
    else if constexpr (__is_same(decltype(operand), const char*&) || __is_same(decltype(operand), const char* const&)) b = operand;
    else a[i - count] = operand;
    i++;
  };
  (take(operands), ...);
  GroupProduct* product = mock_group_begin(sums, count);
  const char* first = mock_exchange(a, sizeof a, 0);
  for (int lane = 0; lane < 32; lane++) __builtin_memcpy(product->a[lane], first + lane * mock_stride, sizeof a);
  product->b = b;
}
