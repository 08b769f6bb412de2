/* glue.h - declarations that the files of hcp._core share. */
#ifndef HCP_PYTHON_GLUE_H
#define HCP_PYTHON_GLUE_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "hcp/hcp.h"

/* A function as a slot's value: ISO C has no such conversion, POSIX and CPython
 * rely on it. */
#define HCP_PY_SLOT(function) ((void *)(uintptr_t)(function))

/* A call of the core while other threads have the GIL. The core then reads copies that the caller
 * owns, and what `reads` holds: a value that nobody changes, kept alive meanwhile (NULL: none). */
typedef struct hcp_py_gil {
  hcp_stop stop; /* for searches, which may take hours: it looks for Ctrl-C many times a second */
  PyObject *reads;
  PyThreadState *state;
  PyObject *function; /* NULL, or gives the times of a cost table in seconds: hcp_py_time */
  double unit;        /* seconds in one unit of them */
  double looked;      /* seconds */
  int32_t raised;
  int32_t
      held; /* the function was called: others have the GIL again when a search looks for Ctrl-C */
} hcp_py_gil;

void hcp_py_drop_gil(hcp_py_gil *gil, PyObject *reads);

/* Returns 1 where a signal's handler or the function has raised: the exception is set. */
int hcp_py_take_gil(hcp_py_gil *gil);

/* What the function of a hcp_py_gil, the context, gives; 1 once it has raised, as does one that
 * does not give 1 to 2^42. It is called with the GIL, which is kept until the search goes on: one
 * that asks for thousands of times does not wait for other threads before each. */
int64_t hcp_py_time(void *context, int64_t length, int32_t degree);

/* The seconds that a Python function gives for a length and a degree in units of so many, rounded
 * up. -1: an exception is set. */
int64_t hcp_py_units(PyObject *function, double unit, int64_t length, int32_t degree);

/* The same for a call that always ends soon: declares `status`. Python looks for signals after
 * it. */
#define HCP_PY_WITHOUT_GIL(reads, status, call) \
  hcp_status status;                            \
  do {                                          \
    hcp_py_gil gil_;                            \
    hcp_py_drop_gil(&gil_, reads);              \
    (status) = (call);                          \
    hcp_py_take_gil(&gil_);                     \
  } while (0)

/* Sets the Python exception that fits *err and returns NULL. An exception that
 * a callback has set already stays. INVALID and INFEASIBLE become ValueError,
 * NO_MEMORY MemoryError, OVERFLOW OverflowError, CALLBACK RuntimeError. */
PyObject *hcp_py_raise(const hcp_error *err);

/* A memoryview over memory that owner keeps alive: no copy. format is 'i'
 * (32 bits) or 'q' (64 bits); width 1 makes a vector of rows, more a matrix of
 * rows x width. writable is for memory that torch may wrap as a tensor. */
PyObject *hcp_py_view(PyObject *module, PyObject *owner, void *data, Py_ssize_t rows,
                      Py_ssize_t width, char format, int writable);

/* What has __index__ and is no bool, and fits; ValueError that names it for anything
 * else. Returns 0, or -1 with an exception set. */
int hcp_py_int64(PyObject *item, const char *name, int64_t *value);
int hcp_py_int32(PyObject *item, const char *name, int32_t *value);

/* A new array of any sequence of them, by the same rules, which names the place
 * ("lengths[3]"). The caller frees *values with PyMem_Free. */
int hcp_py_int64s(PyObject *sequence, const char *name, int64_t **values, Py_ssize_t *n);
int hcp_py_int32s(PyObject *sequence, const char *name, int32_t **values, Py_ssize_t *n);

/* A new tuple of integers. */
PyObject *hcp_py_tuple(const int64_t *values, Py_ssize_t n);

/* More sections than any table has. */
enum { HCP_PY_SECTIONS_MAX = 32 };

/* A memoryview over the table's words, writable, which owns the table. */
PyObject *hcp_py_table(PyObject *module, hcp_table *table);

/* The C value inside a Plan; NULL with TypeError for anything else. */
const hcp_plan *hcp_py_plan(PyObject *module, PyObject *object);

/* A new Payload of a Plan: the method `payload` of it. */
PyObject *hcp_py_payload(PyObject *module, PyObject *plan_object, PyObject *args, PyObject *kwargs);

/* One of an X-macro's texts in a list of what is expected: the list starts
 * behind the first two characters. */
#define HCP_PY_LISTED(name, text) ", '" text "'"

/* An attribute of the module: takes the reference, which is NULL after a
 * failure. Returns 0, or -1 with an exception set. */
int hcp_py_add_owned(PyObject *module, const char *name, PyObject *value);

/* The same of a tuple of names. */
int hcp_py_add_names(PyObject *module, const char *name, const char *const *names, Py_ssize_t n);

/* A new type of the module by that name, kept as an attribute. Returns 0, or -1
 * with an exception set. */
int hcp_py_add_type(PyObject *module, const char *name, PyType_Spec *spec);

/* A new instance of a type that hcp_py_add_type has added. */
PyObject *hcp_py_new(PyObject *module, const char *name);

/* Each adds its types to the module. Returns 0, or -1 with an exception set. */
int hcp_py_add_plan(PyObject *module);
int hcp_py_add_layout(PyObject *module);
int hcp_py_add_payload(PyObject *module);
int hcp_py_add_prices(PyObject *module);
int hcp_py_add_table(PyObject *module);
int hcp_py_add_launches(PyObject *module);
int hcp_py_add_link(PyObject *module);
int hcp_py_add_trees(PyObject *module);
int hcp_py_add_grid(PyObject *module);
int hcp_py_add_slots(PyObject *module);
int hcp_py_add_structure(PyObject *module);
int hcp_py_add_rebinding(PyObject *module);
int hcp_py_add_holders(PyObject *module);

#endif
