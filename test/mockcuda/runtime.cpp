// Runs one launch on the host: the threads of a block are fibers that change over at __syncthreads and at shuffles, warp by warp.
// Returns a text where a GPU would hang or fault: threads of a warp that part before a shuffle, of a block before a barrier, a bad address.
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include "../fiber.h"

struct Dim { int x, y, z; };
Dim blockIdx, threadIdx, blockDim;
enum State { RUN, BARRIER, SHUFFLE, DONE };
static const int MOST = 1024, LANES = 32;
static const size_t STACK = 256 << 10, WIDE = 32;

// cp.async: what a copy reads it reads at once, what it writes it writes no sooner than its thread waits for it
static const int MOST_COPIES = 256;
struct Copy { void* to; char bytes[16]; int group; };
// products of a group of warps that nobody has waited for
static const int MOST_PRODUCTS = 20, MOST_SUMS = 128;
struct GroupMatrix { const char* at; unsigned long long kind; };
struct GroupProduct { unsigned a[32][4]; GroupMatrix rows, b; int in_lanes, transposed; };
struct Pending { GroupProduct product; float* sums[MOST_SUMS]; int count; };
struct Fiber { void* stack; State state; char word[2][WIDE]; int shuffles; Copy copy[MOST_COPIES]; int copies, groups; Pending pending[MOST_PRODUCTS];
               int products; };
static Fiber fiber[MOST];
static void* scheduler;  // the stack of run_block
static int current;
static void* entry;
static uint64_t arg[48];
static sigjmp_buf fault;
static char message[200];

// the kernel's shared memory: the linker names a section's bounds
#ifdef __APPLE__
extern "C" char __start_shared[] __asm("section$start$__DATA$shared");
extern "C" char __stop_shared[] __asm("section$end$__DATA$shared");
#else
extern "C" __attribute__((weak)) char __start_shared[];
extern "C" __attribute__((weak)) char __stop_shared[];
#endif

static void call() {
  typedef uint64_t A;
  typedef void (*Kernel)(A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A,A);
  A* a = arg;  // pointers and ints take a register or 8 bytes each; a kernel looks at as many as it has
  ((Kernel)entry)(a[0],a[1],a[2],a[3],a[4],a[5],a[6],a[7],a[8],a[9],a[10],a[11],a[12],a[13],a[14],a[15],a[16],a[17],a[18],a[19],a[20],a[21],
    a[22],a[23],a[24],a[25],a[26],a[27],a[28],a[29],a[30],a[31],a[32],a[33],a[34],a[35],a[36],
    a[37],a[38],a[39],a[40],a[41],a[42],a[43],a[44],a[45],a[46],a[47]);
}
static void place(int i) { current = i; threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)}; }
static void resume(int i) { place(i); fiber[i].state = RUN; fiber_switch(&scheduler, fiber[i].stack); }
static void wait(State state) { fiber[current].state = state; fiber_switch(&fiber[current].stack, scheduler); }
static void whole() { call(); wait(DONE); }

extern "C" void mock_wait(int at_shuffle) { wait(at_shuffle ? SHUFFLE : BARRIER); }
// gives the lane's bytes to its warp and returns those of the lane `lane`; two places: a lane may be one exchange ahead of another, never two
extern "C" const char* mock_exchange(const void* mine, int bytes, int lane) {
  int me = current, turn = fiber[me].shuffles++ & 1;
  memcpy(fiber[me].word[turn], mine, bytes);
  mock_wait(1);
  return fiber[me / LANES * LANES + lane].word[turn];
}
extern "C" const int mock_stride = sizeof(Fiber);
extern "C" int mock_lane() { return current % LANES; }

static const char* wrong;
extern "C" void mock_copy(void* to, const void* from, int bytes) {
  Fiber& own = fiber[current];
  if (own.copies == MOST_COPIES) { wrong = "a thread waits for more copies than the mock keeps"; return; }
  Copy& copy = own.copy[own.copies++] = {to, {}, own.groups};
  memcpy(copy.bytes, from, bytes);   // the others are zeros
}
extern "C" void mock_group() { fiber[current].groups++; }
// waits for all copies but those of the latest groups; for -1 also for those that are in no group
extern "C" void mock_copied(int groups) {
  Fiber& own = fiber[current];
  int left = 0;
  for (int i = 0; i < own.copies; i++) {
    if (groups < 0 || own.copy[i].group < own.groups - groups) memcpy(own.copy[i].to, own.copy[i].bytes, 16);
    else own.copy[left++] = own.copy[i];
  }
  own.copies = left;
}

extern "C" GroupProduct* mock_group_begin(float** sums, int count) {
  Fiber& own = fiber[current];
  if (own.products == MOST_PRODUCTS) { wrong = "a group begins more products than the mock keeps"; own.products = 0; }
  Pending& pending = own.pending[own.products++];
  memcpy(pending.sums, sums, count * sizeof *sums);
  pending.count = count;
  return &pending.product;
}
extern "C" int mock_warp() { return current / LANES; }
extern "C" void mock_group_finish(void (*add)(const GroupProduct&, float**, int, int)) {
  Fiber& own = fiber[current];
  for (int i = 0; i < own.products; i++) add(own.pending[i].product, own.pending[i].sums, own.pending[i].count, current % LANES);
  own.products = 0;
}

// between devices, each with its own copy of this file's variables and a thread of its own
extern "C" void mock_send(uint64_t* to, uint64_t first, uint64_t second) {
  __atomic_store_n(to, first, __ATOMIC_RELAXED);
  __atomic_store_n(to + 1, second, __ATOMIC_RELAXED);
}
extern "C" void mock_words(uint64_t* first, uint64_t* second, const uint64_t* from) {
  static const uint64_t* last[2];   // two make a line
  if (last[0] == from) sched_yield();   // it was not there
  last[0] = last[1];
  last[1] = from;
  *first = __atomic_load_n(from, __ATOMIC_RELAXED);
  *second = __atomic_load_n(from + 1, __ATOMIC_RELAXED);
}
extern "C" void mock_tell(unsigned* to, unsigned word) { __atomic_store_n(to, word, __ATOMIC_RELEASE); }
extern "C" unsigned mock_word(const unsigned* from) {
  static const unsigned* last;
  if (last == from) sched_yield();   // it was not there
  last = from;
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
extern "C" void mock_trap() {
  wrong = "a trap";
  wait(DONE);
}

static bool run_block(int threads, char* stacks) {
  if (__start_shared) memset(__start_shared, 0xff, __stop_shared - __start_shared);  // NaN until it is written
  for (int i = 0; i < threads; i++) {
    fiber[i].stack = fiber_start(stacks + (i + 1) * STACK, whole);
    fiber[i].state = RUN;
    fiber[i].shuffles = fiber[i].copies = fiber[i].groups = fiber[i].products = 0;
  }
  for (;;) {
    int waiting = 0;
    for (int warp = 0; warp < threads; warp += LANES) {
      int end = warp + LANES < threads ? warp + LANES : threads;
      do for (int i = warp; i < end; i++) if (fiber[i].state != DONE) resume(i);
      while ([&] {
        for (int i = warp + 1; i < end; i++) if (fiber[i].state != fiber[warp].state) return false;
        return fiber[warp].state == SHUFFLE;
      }());
      for (int i = warp; i < end; i++) {
        if (fiber[i].state == SHUFFLE || fiber[i].state != fiber[warp].state) return false;
        waiting += fiber[i].state == BARRIER;
      }
    }
    if (!waiting) return true;
    if (waiting != threads) return false;
  }
}

static void on_fault(int) { siglongjmp(fault, 1); }

extern "C" const char* mock_launch(void* kernel, const uint64_t* args, int n, const int* grid, const int* block, int fibers) {
  static char* stacks = nullptr;
  if (!stacks) stacks = (char*)mmap(0, MOST * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  int threads = block[0] * block[1] * block[2];
  if (n > 48 || threads > MOST) return "more than 48 arguments or 1024 threads";
  entry = kernel;
  memcpy(arg, args, n * sizeof *arg);
  blockDim = {block[0], block[1], block[2]};
  struct sigaction action = {}, segv, bus;
  action.sa_handler = on_fault;
  action.sa_flags = SA_NODEFER;
  bool handles = !(fibers & 2);  // handlers are the process's, and another device may have one of its own
  if (handles) sigaction(SIGSEGV, &action, &segv);
  if (handles) sigaction(SIGBUS, &action, &bus);
  wrong = nullptr;
  if (sigsetjmp(fault, 1)) wrong = "reads or writes outside its buffers";
  else for (int z = 0; z < grid[2] && !wrong; z++) for (int y = 0; y < grid[1] && !wrong; y++) for (int x = 0; x < grid[0] && !wrong; x++) {
    blockIdx = {x, y, z};
    if (!fibers) for (int i = 0; i < threads; i++) { place(i); call(); }
    else if (!run_block(threads, stacks) && !wrong) wrong = "threads part before a barrier or a shuffle";
  }
  if (handles) sigaction(SIGSEGV, &segv, nullptr);
  if (handles) sigaction(SIGBUS, &bus, nullptr);
  if (wrong) snprintf(message, sizeof message, "block (%d, %d, %d), thread %d: %s", blockIdx.x, blockIdx.y, blockIdx.z, current, wrong);
  return wrong ? message : nullptr;
}
