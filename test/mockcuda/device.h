// CUDA C's dialect for a C++ compiler: what a rendered kernel's source is compiled behind. A missing name is a compile error, on purpose.
#pragma once
#define __global__
#define __device__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#ifdef __APPLE__
#define __shared__ static __attribute__((section("__DATA,shared")))
#else
#define __shared__ static __attribute__((section("shared")))
#endif

struct Dim { int x, y, z; };
extern Dim blockIdx, threadIdx, blockDim;
extern "C" void mock_wait(int at_shuffle);
extern "C" const char* mock_exchange(const void* mine, int bytes, int lane);
extern "C" int mock_lane();
extern "C" const int mock_stride;  // bytes from a lane's place to the next one's
#define __syncthreads() mock_wait(0)
#define __syncwarp() (void)0   // it orders loads alone here
template <class T> static inline T __shfl_sync(unsigned, T value, int lane) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
  __builtin_memcpy(&value, mock_exchange(&value, sizeof(T), lane), sizeof(T));
  return value;
}
template <class T> static inline T __shfl_xor_sync(unsigned all, T value, int lane_xor) { return __shfl_sync(all, value, mock_lane() ^ lane_xor); }
static inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const char* first = mock_exchange(&value, sizeof value, 0);
  for (int i = 0; i < 32; i++) { unsigned other; __builtin_memcpy(&other, first + i * mock_stride, sizeof other); if (other > value) value = other; }
  return value;
}
static inline unsigned __ballot_sync(unsigned, bool condition) {
  const char* first = mock_exchange(&condition, sizeof condition, 0);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= (unsigned)(*(const bool*)(first + i * mock_stride)) << i;
  return bits;
}
#define __popc __builtin_popcount
// mma.sync.m16n8kK: lane 4r + q holds of a the rows r and r + 8, of b the column r, of c the columns 2q and 2q + 1
template <int K, class A, class B, class C> static inline C mock_mma(A a, B b, C c) {
  static_assert(sizeof a == K && sizeof b == K / 2, "fragments of halves");
  struct { A a; B b; } mine = {a, b}, of[32];
  int lane = mock_lane();
  const char* first = mock_exchange(&mine, sizeof mine, 0);
  for (int i = 0; i < 32; i++) __builtin_memcpy(&of[i], first + i * mock_stride, sizeof mine);
  float* sum = (float*)&c;
  for (int i = 0; i < 4; i++) for (int k = 0; k < K; k++) {
    int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    auto* x = (decltype(a.x)*)&of[row % 8 * 4 + k % 8 / 2].a;
    auto* y = (decltype(b.x)*)&of[column * 4 + k % 8 / 2].b;
    sum[i] += (float)x[k % 2 + row / 8 * 2 + k / 8 * 4] * (float)y[k % 2 + k / 8 * 2];
  }
  return c;
}
// ldmatrix.x4: lane 8m + r names row r of matrix m; lane 4r + q gets the numbers 2q and 2q + 1 of row r, or of column r, of each
template <int transposed, class W> static inline void mock_ldmatrix(W& a, W& b, W& c, W& d, const void* row) {
  static_assert(sizeof(W) == 4, "words");
  const char* rows[32];
  int lane = mock_lane();
  const char* first = mock_exchange(&row, sizeof row, 0);
  for (int i = 0; i < 32; i++) __builtin_memcpy(&rows[i], first + i * mock_stride, sizeof row);
  W* words[4] = {&a, &b, &c, &d};
  for (int m = 0; m < 4; m++) for (int i = 0; i < 2; i++) {
    int r = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
    __builtin_memcpy((char*)words[m] + 2 * i, rows[m * 8 + r] + 2 * column, 2);
  }
}
extern "C" void mock_copy(void* to, const void* from, int bytes = 16);
extern "C" void mock_group();
extern "C" void mock_send(unsigned long long* to, unsigned long long first, unsigned long long second);
extern "C" void mock_words(unsigned long long* first, unsigned long long* second, const unsigned long long* from);
static inline void mock_look(unsigned long long& first, unsigned long long& second, const unsigned long long* from) { mock_words(&first, &second, from); }
extern "C" void mock_tell(unsigned* to, unsigned word);
extern "C" unsigned mock_word(const unsigned* from);
static inline void mock_hear(unsigned& word, const unsigned* from) { word = mock_word(from); }
extern "C" void mock_trap();
#define __trap mock_trap
extern "C" void mock_copied(int groups);
static inline float __fdividef(float a, float b) { return a / b; }
static inline unsigned mock_count(unsigned* count, unsigned last) { unsigned old = *count; *count = old >= last ? 0 : old + 1; return old; }
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int)(signed char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i);
  return c;
}
static inline int mock_dp4a(unsigned a, int b, int c) {   // unsigned bytes times signed ones
  for (int i = 0; i < 4; i++) c += (int)(unsigned char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i);
  return c;
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned digits) {
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= (unsigned)(((unsigned long long)high << 32 | low) >> (digits >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
static inline float __int_as_float(int v) { float f; __builtin_memcpy(&f, &v, 4); return f; }

#define VECTORS(T) \
  struct __align__(2 * sizeof(T)) T##2 { T x, y; }; static inline T##2 make_##T##2(T x, T y) { return {x, y}; }
#define VECTORS4(T) VECTORS(T) \
  struct __align__(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) T##4 { T x, y, z, w; }; \
  static inline T##4 make_##T##4(T x, T y, T z, T w) { return {x, y, z, w}; }
typedef unsigned int uint; typedef unsigned char uchar; typedef unsigned short ushort;
struct uint1 { uint x; };
VECTORS4(float) VECTORS4(int) VECTORS4(uint) VECTORS4(uchar) VECTORS4(char) VECTORS4(short) VECTORS4(ushort)

#define FLOAT_FUNCTION(name) static inline float name(float x) { return __builtin_##name(x); }
FLOAT_FUNCTION(exp2) FLOAT_FUNCTION(log2) FLOAT_FUNCTION(sin) FLOAT_FUNCTION(sqrt) FLOAT_FUNCTION(trunc)
static inline float max(float a, float b) { return a > b ? a : b; }
