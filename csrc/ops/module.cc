// `megatron_dcp._C`: an empty Python module. Loading it registers the ops of this library.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&definition); }
