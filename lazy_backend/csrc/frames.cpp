// Finds the user's Python line without the GIL: a thread may always read its own stack of frames.
#include "core.h"
#include <Python.h>
#include <torch/csrc/autograd/function.h>

#include <cstring>
#include <unordered_set>

namespace lazysched {
namespace {

// The head of the interpreter's frame, which CPython does not export; one layout per minor version.
#if PY_VERSION_HEX >= 0x030E0000 || PY_VERSION_HEX < 0x030B0000
#define LAZYSCHED_PUBLIC_FRAMES 1
#elif PY_VERSION_HEX >= 0x030C0000
struct RawFrame {
  PyObject* code;
  RawFrame* previous;
  PyObject *func, *globals, *builtins, *locals;
  PyFrameObject* frame_obj;
  _Py_CODEUNIT* instr;
};
#else
struct RawFrame {
  PyObject *func, *globals, *builtins, *locals, *code;
  PyFrameObject* frame_obj;
  RawFrame* previous;
  _Py_CODEUNIT* instr;
};
#endif

std::atomic<bool> capture_on{true};
std::mutex table_mutex;
std::unordered_map<const void*, bool>& table() {  // code object -> is it the user's? Holds a reference to each.
  static auto* t = new std::unordered_map<const void*, bool>();
  return *t;
}

bool is_library(const char* file) {
  return file[0] == '<' ? std::strncmp(file, "<frozen", 7) == 0 || std::strncmp(file, "<interpreter", 12) == 0 || std::strncmp(file, "<shim", 5) == 0
                        : std::strstr(file, "/torch/") != nullptr || std::strstr(file, "/lazy_backend/") != nullptr ||
                              std::strstr(file, "/contextlib.py") != nullptr;
}

bool classify(PyObject* code) {  // takes the GIL, once per code object
  PyGILState_STATE gil = PyGILState_Ensure();
  bool user = false;
  if (PyCode_Check(code)) {
    const char* file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code)->co_filename);
    user = file && !is_library(file);
    if (!file) PyErr_Clear();
  }
  {
    std::lock_guard<std::mutex> lock(table_mutex);
    if (table().emplace(code, user).second) Py_INCREF(code);
  }
  PyGILState_Release(gil);
  return user;
}

bool is_user(PyObject* code) {
  struct Recent {
    const void* code[64];
    bool user[64];
  };
  static thread_local Recent recent{};
  size_t slot = (reinterpret_cast<uintptr_t>(code) >> 5) & 63;
  if (recent.code[slot] == code) return recent.user[slot];
  bool found = false, user = false;
  {
    std::lock_guard<std::mutex> lock(table_mutex);
    auto it = table().find(code);
    if (it != table().end()) found = true, user = it->second;
  }
  if (!found) user = classify(code);
  recent.code[slot] = code;
  recent.user[slot] = user;
  return user;
}

}  // namespace

void set_capture(bool on) { capture_on = on; }

Site capture_site() {
  if (!capture_on) return {};
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (!thread) return {};
#ifdef LAZYSCHED_PUBLIC_FRAMES
  PyGILState_STATE gil = PyGILState_Ensure();
  Site site;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    bool user = is_user(reinterpret_cast<PyObject*>(code));
    if (user) site = {code, -PyFrame_GetLineNumber(frame)};  // negative: a line, not an instruction
    Py_DECREF(code);
    PyFrameObject* back = user ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  PyGILState_Release(gil);
  return site;
#else
#if PY_VERSION_HEX >= 0x030D0000
  auto* frame = reinterpret_cast<RawFrame*>(thread->current_frame);
#else
  auto* frame = thread->cframe ? reinterpret_cast<RawFrame*>(thread->cframe->current_frame) : nullptr;
#endif
  for (; frame; frame = frame->previous) {
    PyObject* code = frame->code;
    if (!code || Py_TYPE(code) != &PyCode_Type || !is_user(code)) continue;
    auto* start = reinterpret_cast<char*>(reinterpret_cast<PyCodeObject*>(code)->co_code_adaptive);
    return {code, static_cast<int32_t>(reinterpret_cast<char*>(frame->instr) - start)};
  }
  return {};
#endif
}

std::string describe_site(const Site& site) {
  if (!site.code) return "";
  PyGILState_STATE gil = PyGILState_Ensure();
  auto* code = static_cast<PyCodeObject*>(const_cast<void*>(site.code));
  int line = site.lasti < 0 ? -site.lasti : PyCode_Addr2Line(code, site.lasti);
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  const char* name = PyUnicode_AsUTF8(code->co_name);
  std::string text = std::string(file ? file : "?") + ":" + std::to_string(line) + " in " + (name ? name : "?");
  PyGILState_Release(gil);
  return text;
}

int64_t backward_sequence() {
  auto node = torch::autograd::get_current_node();
  return node ? static_cast<int64_t>(node->sequence_nr()) : -1;
}

GilRelease::GilRelease() {
  if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
}
GilRelease::~GilRelease() {
  if (state) PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

}  // namespace lazysched
