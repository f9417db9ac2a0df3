// Finds the innermost frame of this thread that runs the user's code. Runs for every op, so it reads the interpreter's frames
// where they lie, without the GIL: a thread may always read its own. CPython does not export their layout; where a version's is
// not known here, Python is asked.
#include <Python.h>
#include <stdint.h>
#include <string.h>

static int starts(const char* text, const char* prefix) { return !strncmp(text, prefix, strlen(prefix)); }

static int is_library(const char* file) {
  if (file[0] == '<') return starts(file, "<frozen") || starts(file, "<interpreter") || starts(file, "<shim");
  return strstr(file, "/torch/") || strstr(file, "/lazy_backend/") || strstr(file, "/contextlib.py");
}

// Takes the GIL. The code object lives for ever then: sites name it.
static int classify(PyObject* code) {
  PyGILState_STATE gil = PyGILState_Ensure();
  Py_INCREF(code);
  const char* file = PyUnicode_AsUTF8(((PyCodeObject*)code)->co_filename);
  if (!file) PyErr_Clear();
  const int user = file && !is_library(file);
  PyGILState_Release(gil);
  return user;
}

// Is this code object the user's? The answers of each thread, by address; of two that share a place the later one stays.
static int is_user(PyObject* code) {
  static __thread struct {
    PyObject* code;
    int user;
  } known[2048];
  const uintptr_t place = ((uintptr_t)code >> 4) * 0x9E3779B97F4A7C15u >> 53;
  if (known[place].code != code) {
    known[place].user = classify(code);
    known[place].code = code;
  }
  return known[place].user;
}

#if PY_VERSION_HEX >= 0x030E0000 || PY_VERSION_HEX < 0x030B0000
void* lazysched_find_site(int32_t* lasti) {
  if (!PyGILState_GetThisThreadState()) return NULL;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* found = NULL;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && !found) {
    PyObject* code = (PyObject*)PyFrame_GetCode(frame);
    if (is_user(code)) {
      found = code;
      *lasti = -PyFrame_GetLineNumber(frame);
    }
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  PyGILState_Release(gil);
  return found;
}
#else
// The head of the interpreter's frame.
typedef struct RawFrame {
#if PY_VERSION_HEX >= 0x030C0000
  PyObject* code;
  struct RawFrame* previous;
  PyObject *func, *globals, *builtins, *locals;
  PyFrameObject* frame_obj;
#else
  PyObject *func, *globals, *builtins, *locals, *code;
  PyFrameObject* frame_obj;
  struct RawFrame* previous;
#endif
  _Py_CODEUNIT* instr;
} RawFrame;

static RawFrame* innermost(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030D0000
  return (RawFrame*)thread->current_frame;
#else
  return thread->cframe ? (RawFrame*)thread->cframe->current_frame : NULL;
#endif
}

// The code of the user's innermost frame, and how far that is: in bytes, or a line as a negative number. Null: there is none.
void* lazysched_find_site(int32_t* lasti) {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  for (RawFrame* frame = thread ? innermost(thread) : NULL; frame; frame = frame->previous) {
    PyObject* code = frame->code;
    if (!code || Py_TYPE(code) != &PyCode_Type || !is_user(code)) continue;
    *lasti = (int32_t)((char*)frame->instr - ((PyCodeObject*)code)->co_code_adaptive);
    return code;
  }
  return NULL;
}
#endif

// "file:line in function", for whoever holds the GIL.
PyObject* lazysched_describe_site(void* code, int32_t lasti) {
  PyCodeObject* c = code;
  return PyUnicode_FromFormat("%U:%d in %U", c->co_filename, lasti < 0 ? -lasti : PyCode_Addr2Line(c, lasti), c->co_name);
}
