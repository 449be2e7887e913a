// Numbers of 16 bits are part of the emulator.
// Source: appendix A15, "A GPU in one header".
#pragma once
#include "cuda_on_cpu.h"
