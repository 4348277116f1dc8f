// `megatron_dcp._C`. Loading it registers the ops; its functions tell and limit the CPU path.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstring>

#include "cpu/paths.h"

namespace {

PyObject* cpu_path(PyObject*, PyObject* argument) {
  const char* const names[] = {"float64", "float32", "bfloat16", "float16"};
  PyObject* bytes = PyUnicode_Check(argument) ? PyUnicode_AsUTF8String(argument) : nullptr;
  if (bytes) {
    const char* name = PyBytes_AsString(bytes);
    for (int i = 0; i < 4; ++i) {
      if (std::strcmp(name, names[i]) == 0) {
        Py_DECREF(bytes);
        return PyUnicode_FromString(mdcp::path_name(static_cast<mdcp::DType>(i)));
      }
    }
    Py_DECREF(bytes);
  }
  PyErr_SetString(PyExc_ValueError, "cpu_path takes float64, float32, bfloat16 or float16.");
  return nullptr;
}

PyObject* limit_cpu_path(PyObject*, PyObject* argument) {
  PyObject* bytes = PyUnicode_Check(argument) ? PyUnicode_AsUTF8String(argument) : nullptr;
  const bool done = bytes && mdcp::limit_path(PyBytes_AsString(bytes));
  Py_XDECREF(bytes);
  if (done) Py_RETURN_NONE;
  PyErr_SetString(PyExc_ValueError,
                  "limit_cpu_path takes best, scalar, avx2, avx512, avx512_bf16 or amx_bf16, and "
                  "not more than this machine has.");
  return nullptr;
}

PyMethodDef methods[] = {
    {"cpu_path", cpu_path, METH_O, "cpu_path(dtype name) -> the path its inputs take"},
    {"limit_cpu_path", limit_cpu_path, METH_O, "limit_cpu_path(name): allow no path above it"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&definition); }
