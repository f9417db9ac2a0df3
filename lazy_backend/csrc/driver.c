// The calls of NVIDIA's driver that programs make at every step. They are found at run time, so that the core builds without CUDA.
// Each function returns null, or what went wrong in the driver's own words.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  void* function;
  unsigned grid[3], block[3], shared;
  void **params, **extra;
  void *kernel, *context;
} KernelNodeParams;  // CUDA_KERNEL_NODE_PARAMS

typedef struct {
  int what, gap;
  union { int on; unsigned blocks[3]; char all[64]; } value;
} Attribute;  // CUlaunchAttribute

typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
} LaunchConfig;  // CUlaunchConfig

enum { kCluster = 4, kOverlap = 6 };  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .._PROGRAMMATIC_STREAM_SERIALIZATION
enum { kMissing = -1 };  // no code of the driver's

static void* find(const char* name) {
  static void* library;
  if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return library ? dlsym(library, name) : NULL;
}

static const char* text(int code) {
  if (!code) return NULL;
  if (code == kMissing) return "libcuda.so.1 cannot be loaded, or is too old";
  const char* words = NULL;
  int (*explain)(int, const char**) = (int (*)(int, const char**))find("cuGetErrorString");
  if (explain) explain(code, &words);
  return words ? words : "an error that the driver has no words for";
}

// Two threads may look for a function at once: they find the same.
#define DRIVER(name, ...)                                                \
  static int (*volatile name)(__VA_ARGS__);                              \
  if (!name) name = (int (*)(__VA_ARGS__))find(#name);                   \
  if (!name) return text(kMissing);

// `grid`: blocks along three axes, and how many along the first run at the same time and reach each other's shared memory.
// `overlaps`: the kernel waits by itself for the one before it, so its blocks may be placed while that one's last blocks run.
const char* lazysched_launch(void* function, const uint32_t* grid, uint32_t threads, uint32_t shared, int overlaps, void* stream,
                             void** args) {
  DRIVER(cuLaunchKernelEx, const LaunchConfig*, void*, void**, void**)
  Attribute how[2];
  unsigned count = 0;
  if (overlaps) how[count++] = (Attribute){kOverlap, 0, {.on = 1}};
  if (grid[3] > 1) how[count++] = (Attribute){kCluster, 0, {.blocks = {grid[3], 1, 1}}};
  const LaunchConfig all = {{grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, stream, how, count};
  return text(cuLaunchKernelEx(&all, function, args, NULL));
}

// What the next launch on a stream that is being captured would wait for, and how many those are.
const char* lazysched_last_captured(void* stream, void** node, size_t* count) {
  DRIVER(cuStreamGetCaptureInfo_v2, void*, int*, uint64_t*, void**, void* const**, size_t*)
  int status = 0;
  void* const* last = NULL;
  const char* error = text(cuStreamGetCaptureInfo_v2(stream, &status, NULL, NULL, &last, count));
  if (!error && *count) *node = last[0];
  return error;
}

const char* lazysched_set_kernel(void* exec, void* node, void* function, const uint32_t* grid, uint32_t threads, uint32_t shared,
                                 void** args) {
  DRIVER(cuGraphExecKernelNodeSetParams_v2, void*, void*, const KernelNodeParams*)
  const KernelNodeParams all = {function, {grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, args, NULL, NULL, NULL};
  return text(cuGraphExecKernelNodeSetParams_v2(exec, node, &all));
}

const char* lazysched_run_graph(void* exec, void* stream) {
  DRIVER(cuGraphLaunch, void*, void*)
  return text(cuGraphLaunch(exec, stream));
}
