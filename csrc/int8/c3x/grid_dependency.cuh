// Programmatic dependent launch, as CUTLASS spells it but with a say in when: its own kernels wait before their first load,
// and that is too early here.
#pragma once

namespace scaled_mm {

// Ends when the preceding kernel of the stream has, its results visible. CUTLASS's own says nothing of memory, so the compiler
// might move loads to before it.
__device__ inline void wait_for_preceding_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// From here on the next kernel of the stream may start, as soon as there is room beside this one; it waits for this one's results
// by itself.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

} // namespace scaled_mm
