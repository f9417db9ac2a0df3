// Finds the user's Python line without the GIL: a thread may always read its own stack of frames.
#include "core.h"
#include <pybind11/pybind11.h>
#include <c10/util/flat_hash_map.h>

#include <cstring>

namespace py = pybind11;

namespace lazysched {
namespace {

std::atomic<bool> capture_on{true};

bool is_library(const char* file) {
  auto starts = [&](const char* prefix) { return std::strncmp(file, prefix, std::strlen(prefix)) == 0; };
  if (file[0] == '<') return starts("<frozen") || starts("<interpreter") || starts("<shim");
  return std::strstr(file, "/torch/") || std::strstr(file, "/lazy_backend/") || std::strstr(file, "/contextlib.py");
}

// Is this code object the user's? Takes the GIL, once per thread and code object, which lives for ever then: sites name it.
bool classify(PyObject* code) {
  py::gil_scoped_acquire gil;
  Py_INCREF(code);
  const char* file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code)->co_filename);
  if (!file) PyErr_Clear();
  return file && !is_library(file);
}

bool is_user(PyObject* code) {
  static thread_local ska::flat_hash_map<const void*, bool> known;
  auto it = known.find(code);
  return it != known.end() ? it->second : known.emplace(code, classify(code)).first->second;
}

#if PY_VERSION_HEX >= 0x030E0000 || PY_VERSION_HEX < 0x030B0000  // frames of another layout: ask Python
Site find_site(PyThreadState*) {
  py::gil_scoped_acquire gil;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* f = reinterpret_cast<PyFrameObject*>(frame.ptr());
    auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(f)));
    if (is_user(code.ptr())) return {code.ptr(), -PyFrame_GetLineNumber(f)};
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(f)));
  }
  return {};
}
#else
// The head of the interpreter's frame, which CPython does not export.
struct RawFrame {
#if PY_VERSION_HEX >= 0x030C0000
  PyObject* code;
  RawFrame* previous;
  PyObject *func, *globals, *builtins, *locals;
  PyFrameObject* frame_obj;
#else
  PyObject *func, *globals, *builtins, *locals, *code;
  PyFrameObject* frame_obj;
  RawFrame* previous;
#endif
  _Py_CODEUNIT* instr;
};

Site find_site(PyThreadState* thread) {
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
}
#endif

}  // namespace

void set_capture(bool on) { capture_on = on; }

Site capture_site() {
  PyThreadState* thread = capture_on ? PyGILState_GetThisThreadState() : nullptr;
  return thread ? find_site(thread) : Site();
}

std::string describe_site(const Site& site) {
  if (!site.code) return "";
  py::gil_scoped_acquire gil;
  auto* code = static_cast<PyCodeObject*>(const_cast<void*>(site.code));
  const int line = site.lasti < 0 ? -site.lasti : PyCode_Addr2Line(code, site.lasti);
  return py::str("{}:{} in {}").format(py::handle(code->co_filename), line, py::handle(code->co_name));
}

GilRelease::GilRelease() { if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread(); }
GilRelease::~GilRelease() { if (state) PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }

}  // namespace lazysched
