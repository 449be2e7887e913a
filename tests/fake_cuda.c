/* A CUDA driver without a GPU, for tests of the launcher. It refuses what a caller must
   not do (a call without context, a handle that is none) and keeps what a launch was
   given, for the test to read. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum {
  OK = 0,
  INVALID_VALUE = 1,
  NOT_INITIALIZED = 3,
  INVALID_CONTEXT = 201,
  NOT_FOUND = 500,
  ILLEGAL_ADDRESS = 700
};
enum { NUM_DEVICES = 2, MAX_KERNELS = 8, MAX_ARGUMENTS = 16 };

/* Set by the test. */
size_t fake_sizes[MAX_ARGUMENTS]; /* bytes of each argument; 0 ends them */
int fake_error;                   /* what the next launches return */

/* Read by the test. */
int fake_depth, fake_loads, fake_launches, fake_grants, fake_granted, fake_device;
unsigned fake_grid[3], fake_block[3], fake_shared;
uint64_t fake_stream;
unsigned char fake_arguments[MAX_ARGUMENTS][8], fake_image[4];
char fake_kernel[200];

static int is_initialized, num_kernels;
static char contexts[NUM_DEVICES], kernels[MAX_KERNELS][200];
static void* current; /* the context on top; the launcher pushes one at most */

static int is_kernel(void* kernel) {
  for (int i = 0; i < num_kernels; i++)
    if (kernel == kernels[i]) return 1;
  return 0;
}

int cuInit(unsigned flags) {
  is_initialized = flags == 0;
  return is_initialized ? OK : INVALID_VALUE;
}

/* The number of a device is not its index, so that mixing them up shows. */
int cuDeviceGet(int* device, int index) {
  if (!is_initialized) return NOT_INITIALIZED;
  *device = 100 + index;
  return index < NUM_DEVICES ? OK : INVALID_VALUE;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (device < 100 || device >= 100 + NUM_DEVICES) return INVALID_VALUE;
  *context = &contexts[device - 100];
  return OK;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute != 97 || device < 100) return INVALID_VALUE;
  *value = 99 * 1024; /* shared memory of a block that asks for more */
  return OK;
}

int cuCtxPushCurrent_v2(void* context) {
  if (context != &contexts[0] && context != &contexts[1]) return INVALID_CONTEXT;
  current = context;
  fake_depth++;
  return OK;
}

int cuCtxPopCurrent_v2(void** context) {
  if (fake_depth == 0) return INVALID_CONTEXT;
  *context = current;
  current = 0;
  fake_depth--;
  return OK;
}

int cuModuleLoadData(void** module, const void* image) {
  if (!current) return INVALID_CONTEXT;
  memcpy(fake_image, image, sizeof fake_image);
  *module = current; /* a module belongs to a context */
  fake_loads++;
  return OK;
}

int cuModuleGetFunction(void** kernel, void* module, const char* name) {
  if (!current || module != current) return INVALID_CONTEXT;
  if (num_kernels == MAX_KERNELS || strstr(name, "missing")) return NOT_FOUND;
  snprintf(kernels[num_kernels], sizeof kernels[0], "%s", name);
  *kernel = kernels[num_kernels++];
  return OK;
}

int cuFuncGetAttribute(int* value, int attribute, void* kernel) {
  if (!is_kernel(kernel)) return INVALID_VALUE;
  switch (attribute) {
    case 0: *value = 640; return OK;  /* threads of a block, at most */
    case 1: *value = 1024; return OK; /* bytes of static shared memory */
    case 4: *value = 80; return OK;   /* registers of a thread */
  }
  return INVALID_VALUE;
}

int cuFuncSetAttribute(void* kernel, int attribute, int value) {
  if (!is_kernel(kernel) || attribute != 8) return INVALID_VALUE;
  fake_granted = value;
  fake_grants++;
  return OK;
}

int cuLaunchKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z,
                   unsigned shared, void* stream, void** arguments, void** extra) {
  unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  unsigned most = fake_granted ? fake_granted : 47 * 1024;
  if (!current) return INVALID_CONTEXT;
  if (!is_kernel(kernel) || extra || shared > most) return INVALID_VALUE;
  if (fake_error) return fake_error;
  snprintf(fake_kernel, sizeof fake_kernel, "%s", (char*)kernel);
  memcpy(fake_grid, grid, sizeof grid);
  memcpy(fake_block, block, sizeof block);
  fake_shared = shared;
  fake_stream = (uint64_t)stream;
  fake_device = (int)((char*)current - contexts);
  memset(fake_arguments, 0, sizeof fake_arguments);
  for (int i = 0; i < MAX_ARGUMENTS && fake_sizes[i]; i++)
    memcpy(fake_arguments[i], arguments[i], fake_sizes[i]);
  fake_launches++;
  return OK;
}

int cuGetErrorName(int code, const char** text) {
  if (code != ILLEGAL_ADDRESS) return INVALID_VALUE;
  *text = "CUDA_ERROR_ILLEGAL_ADDRESS";
  return OK;
}

int cuGetErrorString(int code, const char** text) {
  if (code != ILLEGAL_ADDRESS) return INVALID_VALUE;
  *text = "an illegal memory access was encountered";
  return OK;
}
