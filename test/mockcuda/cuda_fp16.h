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
