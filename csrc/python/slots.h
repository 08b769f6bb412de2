/* slots.h - places of Python objects, and a table of them with their new values. */
#ifndef HCP_PYTHON_SLOTS_H
#define HCP_PYTHON_SLOTS_H

#include "glue.h"

/* How a slot is read and written.
 *
 *   item       owner[key]: dictionaries (an object's __dict__ too), lists
 *   attribute  getattr and setattr, with all that a class makes of them
 *   member     as object does it: past __setattr__, for __slots__ and frozen classes
 *   entry      an item of a dictionary that need not be there: put back, it is gone again
 *   absent     an entry that is taken out, whatever value is given
 *   depth      an item that holds how many switches are open: as the last slot
 *              of a table it tells switches that are left in the wrong order */
#define HCP_PY_SLOT_KINDS(X) \
  X(ITEM, "item")            \
  X(ATTRIBUTE, "attribute")  \
  X(MEMBER, "member")        \
  X(ENTRY, "entry")          \
  X(ABSENT, "absent")        \
  X(DEPTH, "depth")

typedef enum hcp_py_slot_kind {
#define KIND_ENUM(name, text) HCP_PY_SLOT_##name,
  HCP_PY_SLOT_KINDS(KIND_ENUM)
#undef KIND_ENUM
      HCP_PY_SLOT_KIND_COUNT
} hcp_py_slot_kind;

typedef struct hcp_py_slot {
  hcp_py_slot_kind kind;
  PyObject *owner, *key, *path;
} hcp_py_slot;

/* Immutable once made. */
typedef struct hcp_py_slot_table {
  PyObject_HEAD hcp_py_slot *slots;
  PyObject **values; /* by slot */
  Py_ssize_t n;
} hcp_py_slot_table;

/* A new table; the arguments are any iterables of as many items. NULL with an
 * exception set. */
PyObject *hcp_py_slot_table_new(PyObject *slots, PyObject *values);

/* The table inside a SlotTable, borrowed; NULL for any other object. */
hcp_py_slot_table *hcp_py_slot_table_of(PyObject *object);

/* Sets *value to a new reference, or to NULL where an entry is not there.
 * Returns 0, or -1 with an exception set. */
int hcp_py_slot_read(const hcp_py_slot *at, PyObject **value);

/* NULL takes an entry out. Returns 0, or -1 with an exception set. */
int hcp_py_slot_write(const hcp_py_slot *at, PyObject *value);

/* Whether reading and writing run no Python code. */
int hcp_py_slot_is_exact(const hcp_py_slot *at);

#endif
