"""Wraps the wheel's choice of opts for a kernel."""
from __future__ import annotations
from tinygrad import wheel_module
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.codegen.opt.rows import share_rows

_wheel = wheel_module(__name__)

def hand_coded_optimizations(k:Scheduler) -> Scheduler: return k if share_rows(k) else _wheel.hand_coded_optimizations(k)
