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

static void redirect(ElfW(Addr) slot, void* target) {
  uintptr_t page = slot & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
  mprotect((void*)page, (size_t)(slot + sizeof(void*) - page), PROT_READ | PROT_WRITE);
  *(void**)slot = target;
}

// Returns 1 where both functions were found and redirected in the library at `path`, which is loaded already.
__attribute__((visibility("default"))) int lazysched_keep_cuda(const char* path) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  struct link_map* map = 0;
  if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map)) return 0;
  uintptr_t table[DT_NUM] = {0};  // the dynamic section by tag
  for (const ElfW(Dyn)* d = map->l_ld; d->d_tag != DT_NULL; d++)
    if (d->d_tag > 0 && d->d_tag < DT_NUM) table[d->d_tag] = d->d_un.d_ptr;
  const ElfW(Rela)* jumps = (const ElfW(Rela)*)table[DT_JMPREL];
  const ElfW(Sym)* symbols = (const ElfW(Sym)*)table[DT_SYMTAB];
  if (!jumps || !symbols || !table[DT_STRTAB]) return 0;
  int patched = 0;
  for (size_t i = 0; i < table[DT_PLTRELSZ] / sizeof(*jumps); i++) {
    const char* name = (const char*)table[DT_STRTAB] + symbols[ELF64_R_SYM(jumps[i].r_info)].st_name;
    ElfW(Addr) slot = map->l_addr + jumps[i].r_offset;
    if (!strcmp(name, "_ZN2at11accelerator14getAcceleratorEb")) {
      redirect(slot, (void*)&accelerator);
      patched |= 1;
    } else if (!strcmp(name, "_ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE")) {
      original_is = (uint8_t(*)(int8_t))dlsym(library, name);
      if (!original_is) continue;
      redirect(slot, (void*)&is_accelerator);
      patched |= 2;
    }
  }
  return patched == 3;
}
