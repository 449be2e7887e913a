// The activations of gated MLPs, with which they weigh each number by itself. All are
// x times a number between 0 and 1.
// Source: appendix A18, "Small kernels".
#pragma once
#include "common.cuh"

struct Silu {  // x * sigmoid(x)
  __device__ static float of(float x) { return x / (1.0f + __expf(-x)); }
};

struct Gelu {  // x * P(a normal random number < x)
  // erfc(-y) is 1 + erf(y), without the digits that this sum loses where y < 0.
  __device__ static float of(float x) { return 0.5f * x * erfcf(x * -0.70710678f); }
};

struct GeluTanh {  // an approximation of Gelu
  // 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
  __device__ static float of(float x) {
    const float doubled = 1.59576912f * (x + 0.044715f * x * x * x);
    return x / (1.0f + __expf(-doubled));
  }
};
