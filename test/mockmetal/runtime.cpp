// Runs one Metal dispatch on the host. The threads of a threadgroup are fibers that change over only at barriers and SIMD-group operations.
// For a kernel compiled with -fsanitize=thread this file is the sanitizer's runtime too: every load and store of the kernel arrives in access().
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector>
#include "../fiber.h"

typedef uint32_t u32;
typedef uint64_t u64;
struct Position { u32 gid[3], lid[3], tg[3], grid[3]; };   // as in metal_stdlib
struct Range { char* base; u64 size; const char* name; };  // a buffer
struct Dispatch {                                          // as in metal.py
  void (*body)(void**, const Position*);
  void** buffers;
  u32 grid[3], tg[3];
  char *shared, *shared_end;                               // the kernel's threadgroup memory
  u32 check, n_ranges;
  Range* ranges;
};
enum State { READY, BARRIER, SIMD, SIMD_BARRIER, DONE };
static const char* const WHAT[] = {"running", "threadgroup_barrier", "a SIMD-group operation", "simdgroup_barrier", "finished"};
static const u32 MOST = 1024, LANES = 32, STACK = 64 << 10, GUARD = 4096;
struct Thread { void* stack; Position at; State state; int line, flags; u32 exchanges; };

static Thread thread[MOST];
static char* stacks;
static void* scheduler;                                    // the stack pointer of run_threadgroup
static u32 n_threads, group, backwards;                    // backwards: run threads, SIMD-groups and threadgroups in descending order
static const Dispatch* D;
static sigjmp_buf escape;
static char message[640];
alignas(16) static char slots[2][MOST][16];                // two sets: a lane may be one exchange ahead of another, never two
static u32 active[MOST / LANES];                           // the lanes that met at a SIMD-group's last exchange, a bit each
extern "C" { u32 mtl_thread; }                             // the one that runs

static int describe(char* out, size_t room, const char* format, va_list args) {
  const u32* g = thread[mtl_thread].at.gid;
  int n = snprintf(out, room, "thread %u of threadgroup (%u,%u,%u): ", mtl_thread, g[0], g[1], g[2]);
  return n + vsnprintf(out + n, room - n, format, args);
}
[[noreturn]] static void fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  describe(message, sizeof message, format, args);
  siglongjmp(escape, 1);
}

// ---- fibers ----

static void settle();
static void wait(State state, int line, int flags) {
  settle();
  Thread& t = thread[mtl_thread];
  t.state = state, t.line = line, t.flags = flags;
  fiber_switch(&t.stack, scheduler);
}
static void enter() {
  D->body(D->buffers, &thread[mtl_thread].at);
  wait(DONE, 0, 0);
}
static char* stack_of(u32 i) { return stacks + (u64)i * (STACK + GUARD); }
static void start(u32 i) {
  thread[i].stack = fiber_start(stack_of(i) + GUARD + STACK, enter), thread[i].state = READY, thread[i].exchanges = 0;
}
static void resume(u32 i) {
  mtl_thread = i;
  fiber_switch(&scheduler, thread[i].stack);
}

// ---- what metal_stdlib calls ----

extern "C" void mtl_barrier(int of_simdgroup, int flags, int line) { wait(of_simdgroup ? SIMD_BARRIER : BARRIER, line, flags); }
extern "C" u32 mtl_exchange(const void* value, int size, const void** all, int line) {
  u32 me = mtl_thread, set = thread[me].exchanges++ & 1;
  memcpy(slots[set][me], value, size);
  wait(SIMD, line, 0);
  *all = slots[set][me / LANES * LANES];
  return active[me / LANES];
}

// ---- checks: who touched each byte last, and whether a barrier lies between ----

struct Mark { u32 who, tg, sg; };                          // 1 + thread over all threadgroups; barriers its threadgroup, its SIMD-group had passed
struct Cell { Mark write, read; };                         // of a byte: the last write, and a read since; MANY: several threads read it
struct Written { char *at, before[16], after[16]; u32 size; };
static const u32 MANY = ~0u;
static std::vector<Cell*> shadow;                          // a buffer each
static Cell* shared_shadow;
static u32 tg_passed[2], sg_passed[MOST / LANES][2];       // barriers by now; [0] for device memory, [1] for threadgroup memory
static std::vector<Written> written;                       // all stores to buffers, to take them back
static struct { char *at, before[16], text[512]; u32 size; } suspect;  // a store on top of another thread's: a race unless it is of the same value

static void settle() {
  if (!suspect.size) return;
  bool differs = memcmp(suspect.at, suspect.before, suspect.size) != 0;
  suspect.size = 0;
  if (!differs) return;
  strcpy(message, suspect.text);
  siglongjmp(escape, 1);
}
static void suspicious(char* at, u32 size, const char* format, ...) {
  va_list args;
  va_start(args, format);
  describe(suspect.text, sizeof suspect.text, format, args);
  memcpy(suspect.before, suspect.at = at, suspect.size = size);
}
static bool before(const Mark& m, u32 me, bool shared) {   // is that access ordered before what the running thread does now?
  u32 sg = mtl_thread / LANES;
  if (!m.who || m.who == me) return true;
  if ((m.who - 1) / MOST != group) return false;           // threadgroups of one dispatch are never ordered
  return m.tg != tg_passed[shared] || ((m.who - 1) % MOST / LANES == sg && m.sg != sg_passed[sg][shared]);
}
static const Range* nearest(char* p, long* offset) {        // the buffer that an address just outside it was meant for
  for (u32 i = 0; i < D->n_ranges; i++) {
    const Range& r = D->ranges[i];
    *offset = p - r.base;
    if (*offset > -(long)GUARD && *offset < (long)r.size + GUARD) return &r;
  }
  return nullptr;
}
static void access(char* p, u32 size, bool write, bool whole, void* pc) {  // whole: the compiler takes it to be aligned to its size
  if (!D || !D->check) return;
  settle();
  if (p >= stack_of(mtl_thread) && p < stack_of(mtl_thread + 1)) return;
  const char* verb = write ? "write" : "read";
  bool shared = p >= D->shared && p < D->shared_end;
  Cell* cell = shared ? shared_shadow + (p - D->shared) : nullptr;
  long offset = p - D->shared;
  const Range* range = nullptr;
  for (u32 i = 0; i < D->n_ranges && !cell; i++) {
    const Range& r = D->ranges[i];
    if (p < r.base || p >= r.base + r.size) continue;
    if (!shadow[i])
      shadow[i] = (Cell*)mmap(0, r.size * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    range = &r, offset = p - r.base, cell = shadow[i] + offset;
  }
  if (!cell && !(range = nearest(p, &offset))) return;     // a constant table in the kernel's own image
  const char* name = range ? range->name : "threadgroup memory";
  if (range && (offset < 0 || offset + size > range->size))
    fail("%s of %u bytes at offset %ld of %s, which has %lu bytes [pc %p]", verb, size, offset, name, (unsigned long)range->size, pc);
  if (whole && ((u64)p & (size - 1))) fail("%s of %u bytes at offset %ld of %s is not aligned [pc %p]", verb, size, offset, name, pc);
  if (write && !shared) {
    written.push_back({p, {}, {}, size});
    memcpy(written.back().before, p, size);
  }
  Mark now = {group * MOST + mtl_thread + 1, tg_passed[shared], sg_passed[mtl_thread / LANES][shared]};
  for (u32 i = 0; i < size; i++, cell++) {
    if (shared && !write && !cell->write.who) fail("read of threadgroup memory that was never written, byte %ld [pc %p]", offset + i, pc);
    if (!before(cell->write, now.who, shared)) {
      u32 other = cell->write.who - 1;
      const char* text = "%s of %s, byte %ld, races with the write by thread %u of threadgroup %u [pc %p]";
      if (!write) fail(text, verb, name, offset + i, other % MOST, other / MOST, pc);
      if (!suspect.size) suspicious(p, size, text, verb, name, offset + i, other % MOST, other / MOST, pc);
    }
    // of several reads only the last barrier interval is kept, and whether all were of this threadgroup (read.sg)
    bool many = cell->read.who == MANY;
    bool old = many ? cell->read.sg == group && cell->read.tg != tg_passed[shared] : before(cell->read, now.who, shared);
    if (write) {
      if (!old) fail("write of %s, byte %ld, races with a read by another thread [pc %p]", name, offset + i, pc);
      *cell = {now, {}};
    } else if (old) cell->read = now;
    else {
      bool ours = many ? cell->read.sg == group : (cell->read.who - 1) / MOST == group;
      cell->read = {MANY, now.tg, ours ? group : MANY};
    }
  }
}
#define PC __builtin_return_address(0)
#define HOOK(kind, size, whole) \
  extern "C" void __tsan_##kind##read##size(char* p) { access(p, size, false, whole, PC); } \
  extern "C" void __tsan_##kind##write##size(char* p) { access(p, size, true, whole, PC); }
HOOK(, 1, true) HOOK(, 2, true) HOOK(, 4, true) HOOK(, 8, true) HOOK(, 16, true)
HOOK(unaligned_, 2, false) HOOK(unaligned_, 4, false) HOOK(unaligned_, 8, false) HOOK(unaligned_, 16, false)
static void span(char* p, u64 n, bool write, void* pc) { for (u64 i = 0; i < n; i++) access(p + i, 1, write, true, pc); }
extern "C" void* __tsan_memcpy(void* to, const void* from, u64 n) {
  span((char*)from, n, false, PC), span((char*)to, n, true, PC);
  return memcpy(to, from, n);
}
extern "C" void* __tsan_memset(void* to, int value, u64 n) {
  span((char*)to, n, true, PC);
  return memset(to, value, n);
}
extern "C" void __tsan_init() {}

// ---- the schedule ----

static u32 pick(u32 i, u32 n) { return backwards ? n - 1 - i : i; }

static void meet_simdgroup(u32 sg, u32 n) {                // runs a SIMD-group of n lanes until it is done or waits for its threadgroup
  for (u32 first = sg * LANES;;) {
    for (u32 i = 0; i < n; i++) if (u32 t = first + pick(i, n); thread[t].state == READY) resume(t);
    u32 on = 0, last = 0;
    for (u32 i = 0; i < n; i++) if (State s = thread[first + i].state; s == SIMD || s == SIMD_BARRIER) on |= 1u << i, last = first + i;
    if (!on) return;
    const Thread& other = thread[last];
    for (u32 i = 0; i < n; i++) {
      Thread& t = thread[mtl_thread = first + i];
      if (t.state != DONE && (t.state != other.state || t.line != other.line))
        fail("is at %s, line %d, while thread %u of the SIMD-group is at %s, line %d", WHAT[t.state], t.line, last, WHAT[other.state], other.line);
    }
    if (other.state == SIMD_BARRIER) for (int m = 0; m < 2; m++) sg_passed[sg][m] += other.flags >> m & 1;
    active[sg] = on;
    for (u32 i = 0; i < n; i++) if (on >> i & 1) thread[first + i].state = READY;
  }
}
static void run_threadgroup() {
  for (u32 i = 0; i < n_threads; i++) start(i);
  for (u32 n = (n_threads + LANES - 1) / LANES;;) {
    for (u32 i = 0; i < n; i++) if (u32 sg = pick(i, n), left = n_threads - sg * LANES; true) meet_simdgroup(sg, left < LANES ? left : LANES);
    u32 waiting = 0, last = 0;
    for (u32 i = 0; i < n_threads; i++) if (thread[i].state == BARRIER) waiting++, last = i;
    if (!waiting) return;
    const Thread& other = thread[last];
    for (u32 i = 0; i < n_threads; i++) {
      Thread& t = thread[mtl_thread = i];
      if (t.state != BARRIER || t.line != other.line)
        fail("is %s, line %d, while thread %u waits at threadgroup_barrier, line %d", WHAT[t.state], t.line, last, other.line);
    }
    for (int m = 0; m < 2; m++) tg_passed[m] += other.flags >> m & 1;
    for (u32 i = 0; i < n_threads; i++) thread[i].state = READY;
  }
}
static void run_grid(u32 descending) {
  u64 n_shared = D->shared_end - D->shared;
  u32 n = D->grid[0] * D->grid[1] * D->grid[2];
  backwards = descending;
  if (D->check) shadow.assign(D->n_ranges, nullptr), shared_shadow = (Cell*)calloc(n_shared + 1, sizeof(Cell));
  bool failed = sigsetjmp(escape, 0);
  for (u32 k = 0; k < n && !failed; k++) {
    group = pick(k, n);
    for (u32 i = 0; i < n_threads; i++) {
      Position& p = thread[i].at;
      u32 at = group, in = i;
      for (int a = 0; a < 3; a++) {
        p.grid[a] = D->grid[a], p.tg[a] = D->tg[a];
        p.gid[a] = at % D->grid[a], p.lid[a] = in % D->tg[a];
        at /= D->grid[a], in /= D->tg[a];
      }
    }
    if (n_shared) memset(D->shared, 0xff, n_shared);       // NaN: it starts undefined
    if (D->check) memset(shared_shadow, 0, n_shared * sizeof(Cell));
    run_threadgroup();
  }
  if (!D->check) return;
  for (u32 i = 0; i < D->n_ranges; i++) if (shadow[i]) munmap(shadow[i], D->ranges[i].size * sizeof(Cell));
  free(shared_shadow);
}
static void run_twice() {                                  // the second time in another order; what is written must be the same
  written.clear();
  suspect.size = 0;
  run_grid(0);
  if (message[0]) return;
  std::vector<Written> first;
  first.swap(written);
  for (Written& w : first) memcpy(w.after, w.at, w.size);  // as it stands at the end
  for (size_t i = first.size(); i-- > 0;) memcpy(first[i].at, first[i].before, first[i].size);
  run_grid(1);
  for (const Written& w : first) if (!message[0] && memcmp(w.at, w.after, w.size)) for (u32 i = 0; i < D->n_ranges; i++) {
    const Range& r = D->ranges[i];
    if (w.at < r.base || w.at >= r.base + r.size) continue;
    snprintf(message, sizeof message, "offset %ld of %s depends on the order in which threads run", (long)(w.at - r.base), r.name);
  }
}

static void on_signal(int signal, siginfo_t* info, void*) {
  long offset;
  if (signal == SIGFPE) fail("integer division by zero");
  if (const Range* r = nearest((char*)info->si_addr, &offset))
    fail("access at offset %ld of %s, which has %lu bytes", offset, r->name, (unsigned long)r->size);
  fail("access outside all buffers");
}
extern "C" const char* mtl_run(const Dispatch* d) {        // null, or what is wrong
  static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE};
  static thread_local char* signal_stack;
  if (!stacks) {
    stacks = (char*)mmap(0, (u64)MOST * (STACK + GUARD), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (u32 i = 0; i < MOST; i++) mprotect(stack_of(i), GUARD, PROT_NONE);
  }
  if (!signal_stack) {
    stack_t s = {};
    s.ss_sp = signal_stack = (char*)malloc(s.ss_size = 1 << 16);
    sigaltstack(&s, 0);
  }
  struct sigaction action = {}, old[3];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &action, &old[i]);
  D = d;
  message[0] = 0;
  n_threads = d->tg[0] * d->tg[1] * d->tg[2];
  d->check ? run_twice() : run_grid(0);
  for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &old[i], 0);
  D = nullptr;
  return message[0] ? message : nullptr;
}
