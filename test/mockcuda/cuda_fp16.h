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
// wgmma.m64nNk16 of a warp's 16 rows: a in its lanes as mma.sync has it, or in shared memory like b, whose rows are columns, or transposed inner numbers.
// Nothing is read in shared memory, or added, before the thread waits: the latest that a card does it
struct GroupMatrix { const char* at; unsigned long long kind; };
struct GroupProduct { unsigned a[32][4]; GroupMatrix rows, b; int in_lanes, transposed; };
extern "C" GroupProduct* mock_group_begin(float** sums, int count);
extern "C" void mock_group_finish(void (*add)(const GroupProduct&, float**, int, int));
extern "C" int mock_warp();
static inline float mock_in_group(const GroupMatrix& matrix, int row, int number) {  // a panel has 64 numbers of a row
  unsigned long long at = (unsigned long long)matrix.at + number / 64 * ((matrix.kind >> 16 & 0x3fff) << 4) + row * 128 + number % 64 * 2;
  return (float)*(const half*)(at ^ (at >> 7 & 7) << 4);
}
static inline void mock_group_add(const GroupProduct& product, float** sums, int count, int lane) {
  for (int i = 0; i < count; i++) for (int k = 0; k < 16; k++) {
    int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float x = product.in_lanes ? (float)((const half*)product.a[row % 8 * 4 + k % 8 / 2])[k % 2 + row / 8 * 2 + k / 8 * 4]
                               : mock_in_group(product.rows, mock_warp() % 4 * 16 + row, k);
    *sums[i] += x * (product.transposed ? mock_in_group(product.b, k, column) : mock_in_group(product.b, column, k));
  }
}
static inline void mock_group_wait() { mock_group_finish(mock_group_add); }
template <int transposed, class... T> static inline void mock_group_mma(T&&... operands) {
  float* sums[sizeof...(T)];
  unsigned a[4] = {};
  GroupMatrix matrices[2];
  int count = 0, words = 0, found = 0;
  auto take = [&](auto& operand) {
    if constexpr (__is_same(decltype(operand), float&)) sums[count++] = &operand;
    else if constexpr (__is_same(decltype(operand), const GroupMatrix&)) matrices[found++] = operand;
    else a[words++] = operand;
  };
  (take(operands), ...);
  GroupProduct* product = mock_group_begin(sums, count);
  const char* first = mock_exchange(a, sizeof a, 0);
  for (int lane = 0; lane < 32; lane++) __builtin_memcpy(product->a[lane], first + lane * mock_stride, sizeof a);
  product->rows = matrices[0], product->b = matrices[found - 1], product->in_lanes = words, product->transposed = transposed;
}
