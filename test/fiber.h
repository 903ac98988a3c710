// A stack of its own for each of a block's threads: what both mocks run them on. ucontext's swapcontext calls the kernel twice a switch.
#pragma once
#include <stdint.h>
#include <string.h>

// to another stack; what a function must preserve is kept on the old one
extern "C" void fiber_switch(void** save, void* load) asm("fiber_switch");
#if defined(__x86_64__)
static const int FIBER_SAVED = 8, FIBER_RETURN = 6;        // words: six registers, the return address, alignment
asm(R"(.text
fiber_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret)");
#elif defined(__aarch64__)
static const int FIBER_SAVED = 20, FIBER_RETURN = 11;
asm(R"(.text
.p2align 2
fiber_switch:
  stp x19, x20, [sp, #-160]!
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x19, x20, [sp], #160
  ret)");
#endif

// what to switch to for fxn to begin on the stack that ends before `end`; fxn must not return
static void* fiber_start(char* end, void (*fxn)()) {
  uint64_t* top = (uint64_t*)end - FIBER_SAVED;
  memset(top, 0, FIBER_SAVED * sizeof *top);
  top[FIBER_RETURN] = (uint64_t)fxn;
  return top;
}
