// Keeps CUDA's autograd working beside a PrivateUse1 device (https://github.com/pytorch/pytorch/issues/161129).
//
// PyTorch believes in one accelerator a process, and takes PrivateUse1 for it as soon as that has a name; backward over CUDA
// tensors then stops at an internal assertion, for it looks for streams of the wrong device. Recording needs no streams, so
// inside libtorch_cpu, where the autograd engine lives, CUDA stays the accelerator and the lazy device counts as none. The two
// functions that say so are redirected in that library's own jump table; torch.accelerator in Python is not changed.
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

static uint8_t (*original_is)(int8_t);

static OptionalDevice accelerator(uint8_t checked) {
  (void)checked;
  return (OptionalDevice){kCUDA, 1};
}
static uint8_t is_accelerator(int8_t type) { return type != kPrivateUse1 && original_is(type); }

typedef struct {
  const char* library;
  int patched;
} Search;

static void redirect(ElfW(Addr) slot, void* target) {
  uintptr_t page = slot & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
  mprotect((void*)page, (size_t)(slot + sizeof(void*) - page), PROT_READ | PROT_WRITE);
  *(void**)slot = target;
}

static int visit(struct dl_phdr_info* info, size_t size, void* data) {
  (void)size;
  Search* search = data;
  if (!info->dlpi_name || !strstr(info->dlpi_name, search->library)) return 0;
  const ElfW(Rela)* relocations = 0;
  const ElfW(Sym)* symbols = 0;
  const char* names = 0;
  size_t bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    for (const ElfW(Dyn)* d = (const ElfW(Dyn)*)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr); d->d_tag != DT_NULL; d++) {
      if (d->d_tag == DT_JMPREL) relocations = (const ElfW(Rela)*)d->d_un.d_ptr;
      if (d->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym)*)d->d_un.d_ptr;
      if (d->d_tag == DT_STRTAB) names = (const char*)d->d_un.d_ptr;
      if (d->d_tag == DT_PLTRELSZ) bytes = d->d_un.d_val;
    }
  }
  if (!relocations || !symbols || !names) return 0;
  for (size_t i = 0; i < bytes / sizeof(*relocations); i++) {
    const char* name = names + symbols[ELF64_R_SYM(relocations[i].r_info)].st_name;
    ElfW(Addr) slot = info->dlpi_addr + relocations[i].r_offset;
    if (!strcmp(name, "_ZN2at11accelerator14getAcceleratorEb")) {
      redirect(slot, (void*)&accelerator);
      search->patched |= 1;
    } else if (!strcmp(name, "_ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE")) {
      void* library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
      original_is = library ? (uint8_t(*)(int8_t))dlsym(library, name) : 0;
      if (!original_is) continue;
      redirect(slot, (void*)&is_accelerator);
      search->patched |= 2;
    }
  }
  return 1;
}

// Returns 1 where both functions were found and redirected.
__attribute__((visibility("default"))) int lazysched_keep_cuda(void) {
  Search search = {"libtorch_cpu.so", 0};
  dl_iterate_phdr(&visit, &search);
  return search.patched == 3;
}
