/* link.c - numbers and structures of signals, by name. */
#include "glue.h"
#include "hcp/signal.h"

/* {name: number} of a list that ends with a name that is NULL. */
typedef struct number {
  const char *name;
  int64_t value;
} number;

static PyObject *dict_of(const number *numbers) {
  PyObject *dict = PyDict_New();
  for (; dict != NULL && numbers->name != NULL; numbers++) {
    PyObject *value = PyLong_FromLongLong(numbers->value);
    if (value == NULL || PyDict_SetItemString(dict, numbers->name, value) < 0) Py_CLEAR(dict);
    Py_XDECREF(value);
  }
  return dict;
}

static PyObject *signal_tag(PyObject *module, PyObject *word) {
  (void)module;
  int64_t value;
  if (hcp_py_int64(word, "word", &value) < 0) return NULL;
  return PyLong_FromUnsignedLong(hcp_signal_tag((uint64_t)value));
}

static PyMethodDef functions[] = {{"signal_tag", signal_tag, METH_O, "The tag of a signal's word."},
                                  {NULL, NULL, 0, NULL}};

int hcp_py_add_link(PyObject *module) {
#define NUMBER(name, value) {#name, value},
#define FIELD(type, name) #name,
  static const number numbers[] = {HCP_SIGNAL_NUMBERS(NUMBER){NULL, 0}};
  static const char *const failure[] = {HCP_SIGNAL_FAILURE(FIELD)};
  static const char *const watch[] = {HCP_WATCH(FIELD)};
#undef NUMBER
#undef FIELD
  if (hcp_py_add_owned(module, "SIGNALS", dict_of(numbers)) < 0 ||
      hcp_py_add_names(module, "SIGNAL_FAILURE", failure, sizeof failure / sizeof *failure) < 0 ||
      hcp_py_add_names(module, "WATCH", watch, sizeof watch / sizeof *watch) < 0)
    return -1;
  return PyModule_AddFunctions(module, functions);
}
