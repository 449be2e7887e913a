// assert is part of the emulator: C's would end the program, and Python with it.
// Source: appendix A15, "A GPU in one header".
#pragma once
#include "cuda_on_cpu.h"
