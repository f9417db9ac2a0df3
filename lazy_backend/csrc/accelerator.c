// Keeps CUDA's autograd working beside a PrivateUse1 device (https://github.com/pytorch/pytorch/issues/161129).
//
// PyTorch believes in one accelerator a process, and takes PrivateUse1 for it as soon as that has a name; backward over CUDA
// tensors then stops at an internal assertion, for it looks for streams of the wrong device. Recording needs no streams, so
// inside libtorch_cpu, where the autograd engine lives, CUDA stays the accelerator and the lazy device counts as none. The two
// functions that say so are redirected in that library's own jump table. Those that serve Python from the same library
// (at::accelerator::setCurrentStream and its like, behind torch.accelerator and `with torch.Stream():`) go on asking the original,
// unless it is the engine that calls them. In libtorch_python an integer goes on naming a CUDA device.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
  int8_t type;
  uint8_t engaged;
} OptionalDevice;  // std::optional<c10::DeviceType>

enum { kCUDA = 1, kPrivateUse1 = 20 };

typedef struct {
  int64_t device, id;  // c10::Stream, as it travels in two registers
} Stream;

static uint8_t (*original_is)(int8_t);
static OptionalDevice (*original_get)(uint8_t);
static Stream (*original_stream)(int8_t);
static __thread int engine_asks;
// The functions that serve Python.
static const char* const kServing[] = {
    "11deviceCountEv",         "14setDeviceIndexEa",       "14getDeviceIndexEv",  "16setCurrentStreamEN3c106StreamE",
    "16getCurrentStreamEa",    "17synchronizeDeviceEa",    "14exchangeDeviceEa",  "19maybeExchangeDeviceEa",
    "19getDeviceCapabilityEa", "14emptyHostCacheEv",
};
static struct {
  uintptr_t start, size;
} serving[sizeof(kServing) / sizeof(*kServing)];  // those functions, as far as this torch has them
static int servers;

static void note_serving(void* library) {
  for (size_t i = 0; i < sizeof(kServing) / sizeof(*kServing); i++) {
    char name[96] = "_ZN2at11accelerator";
    const ElfW(Sym)* symbol = 0;
    Dl_info info;
    void* function = dlsym(library, strcat(name, kServing[i]));
    if (!function || !dladdr1(function, &info, (void**)&symbol, RTLD_DL_SYMENT) || !symbol) continue;
    serving[servers].start = (uintptr_t)function;
    serving[servers++].size = symbol->st_size;
  }
}
static int serves_python(uintptr_t caller) {
  for (int i = 0; i < servers; i++)
    if (caller - serving[i].start < serving[i].size) return 1;
  return 0;
}

static OptionalDevice accelerator(uint8_t checked) {
  if (!engine_asks && serves_python((uintptr_t)__builtin_return_address(0))) return original_get(checked);
  return (OptionalDevice){kCUDA, 1};
}
static Stream stream_for_engine(int8_t index) {
  engine_asks = 1;
  Stream stream = original_stream(index);
  engine_asks = 0;
  return stream;
}
static uint8_t is_accelerator(int8_t type) { return type != kPrivateUse1 && original_is(type); }

static void redirect(ElfW(Addr) slot, void* target) {
  uintptr_t page = slot & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
  mprotect((void*)page, (size_t)(slot + sizeof(void*) - page), PROT_READ | PROT_WRITE);
  *(void**)slot = target;
}

// An integer names a device of the current accelerator: in programs for CUDA, `x.to(0)` has to go on meaning cuda:0.
static OptionalDevice accelerator_of_an_integer(uint8_t checked) {
  return checked ? (OptionalDevice){kCUDA, 1} : original_get(checked);
}

static int patched;
typedef void (*Visit)(void* library, const char* name, ElfW(Addr) slot);

static void in_libtorch_cpu(void* library, const char* name, ElfW(Addr) slot) {
  if (!strcmp(name, "_ZN2at11accelerator16getCurrentStreamEa")) {
    original_stream = (Stream(*)(int8_t))dlsym(library, name);
    if (original_stream) redirect(slot, (void*)&stream_for_engine);
  } else if (!strcmp(name, "_ZN2at11accelerator14getAcceleratorEb")) {
    original_get = (OptionalDevice(*)(uint8_t))dlsym(library, name);
    if (!original_get) return;
    redirect(slot, (void*)&accelerator);
    patched |= 1;
  } else if (!strcmp(name, "_ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE")) {
    original_is = (uint8_t(*)(int8_t))dlsym(library, name);
    if (!original_is) return;
    redirect(slot, (void*)&is_accelerator);
    patched |= 2;
  }
}
static void in_libtorch_python(void* library, const char* name, ElfW(Addr) slot) {
  (void)library;
  if (!strcmp(name, "_ZN2at11accelerator14getAcceleratorEb")) redirect(slot, (void*)&accelerator_of_an_integer);
}

// Every function that the library at `path`, which is loaded already, calls through its jump table.
static void* visit_jumps(const char* path, Visit visit) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  struct link_map* map = 0;
  if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map)) return 0;
  uintptr_t table[DT_NUM] = {0};  // the dynamic section by tag
  for (const ElfW(Dyn)* d = map->l_ld; d->d_tag != DT_NULL; d++)
    if (d->d_tag > 0 && d->d_tag < DT_NUM) table[d->d_tag] = d->d_un.d_ptr;
  const ElfW(Rela)* jumps = (const ElfW(Rela)*)table[DT_JMPREL];
  const ElfW(Sym)* symbols = (const ElfW(Sym)*)table[DT_SYMTAB];
  if (!jumps || !symbols || !table[DT_STRTAB]) return 0;
  for (size_t i = 0; i < table[DT_PLTRELSZ] / sizeof(*jumps); i++)
    visit(library, (const char*)table[DT_STRTAB] + symbols[ELF64_R_SYM(jumps[i].r_info)].st_name, map->l_addr + jumps[i].r_offset);
  return library;
}

// Returns 1 where the functions that matter to autograd were found and redirected.
__attribute__((visibility("default"))) int lazysched_keep_cuda(const char* libtorch_cpu, const char* libtorch_python) {
  if (servers) return 1;  // an earlier call did it
  void* library = visit_jumps(libtorch_cpu, &in_libtorch_cpu);
  if (!library || patched != 3) return 0;
  note_serving(library);
  visit_jumps(libtorch_python, &in_libtorch_python);
  return 1;
}
