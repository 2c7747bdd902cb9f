// What this library needs of Python, without Python's headers, which many machines lack: the symbols are those of the
// running interpreter, and weak, so a C++ program without one can load the library, too.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

extern "C" {
struct _object;
struct _ts;
#define SIM_PYTHON __attribute__((weak)) extern
SIM_PYTHON int Py_IsInitialized();
SIM_PYTHON int Py_IsFinalizing();
SIM_PYTHON int _Py_IsFinalizing();
SIM_PYTHON int PyGILState_Check();
SIM_PYTHON int PyGILState_Ensure();
SIM_PYTHON void PyGILState_Release(int);
SIM_PYTHON _ts* PyEval_SaveThread();
SIM_PYTHON void PyEval_RestoreThread(_ts*);
SIM_PYTHON _object* PyEval_GetFrame();
SIM_PYTHON _object* PyFrame_GetBack(_object*);
SIM_PYTHON _object* PyFrame_GetCode(_object*);
SIM_PYTHON int PyFrame_GetLineNumber(_object*);
SIM_PYTHON _object* PyObject_GetAttrString(_object*, const char*);
SIM_PYTHON const char* PyUnicode_AsUTF8(_object*);
SIM_PYTHON void PyErr_Clear();
SIM_PYTHON void Py_IncRef(_object*);
SIM_PYTHON void Py_DecRef(_object*);
#undef SIM_PYTHON
}

namespace sim {

inline bool python_runs() {
  if (!Py_IsInitialized || !Py_IsInitialized()) return false;
  if (Py_IsFinalizing) return !Py_IsFinalizing();
  return !_Py_IsFinalizing || !_Py_IsFinalizing();
}

// Lets other threads run Python while this one waits.
class WithoutGil {
 public:
  WithoutGil() : state_(python_runs() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  _ts* state_;
};

// The lines of Python that called into torch, innermost first, as "file:line:function" separated by newlines. Files of
// torch itself and of this package are left out: `hidden` holds the beginnings of their paths.
class Lines {
 public:
  std::vector<std::string> hidden;
  size_t most = 3;
  bool on = true;

  std::string now() {
    if (!on || !python_runs()) return "";
    const int state = PyGILState_Ensure();
    std::string found;
    size_t count = 0;
    _object* frame = PyEval_GetFrame();
    if (frame) Py_IncRef(frame);
    while (frame && count < most) {
      _object* code = PyFrame_GetCode(frame);
      const auto& [shown, name, function] = of(code);
      if (shown) {
        found += (count++ ? "\n" : "") + name + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + ":" + function;
      }
      Py_DecRef(code);
      _object* back = PyFrame_GetBack(frame);
      Py_DecRef(frame);
      frame = back;
    }
    if (frame) Py_DecRef(frame);
    PyGILState_Release(state);
    return found;
  }

 private:
  struct Code {
    bool shown;
    std::string name, function;
  };

  const Code& of(_object* code) {
    if (auto found = codes_.find(code); found != codes_.end()) return found->second;
    Py_IncRef(code);  // the address stays this code's
    Code made{true, text(code, "co_filename"), text(code, "co_name")};
    for (const auto& beginning : hidden) made.shown &= made.name.rfind(beginning, 0) != 0;
    return codes_[code] = made;
  }

  static std::string text(_object* object, const char* name) {
    _object* value = PyObject_GetAttrString(object, name);
    const char* found = value ? PyUnicode_AsUTF8(value) : nullptr;
    std::string copy = found ? found : "?";
    if (value) Py_DecRef(value);
    else PyErr_Clear();
    return copy;
  }

  std::unordered_map<_object*, Code> codes_;  // the GIL guards it
};

inline Lines& lines() {
  static auto* all = new Lines;
  return *all;
}

}  // namespace sim
