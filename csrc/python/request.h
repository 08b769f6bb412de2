/* request.h - the arguments of every call that plans. */
#ifndef HCP_PYTHON_REQUEST_H
#define HCP_PYTHON_REQUEST_H

#include "glue.h"

/* What every request has: all arrays are this request's own. */
typedef struct request {
  hcp_limits limits;
  hcp_cost cost;
  hcp_times times;
  int64_t *lengths;
  Py_ssize_t n;
  int64_t *table_lengths, *table_times, *pairs;
  int32_t *table_degrees;
  PyObject *function; /* NULL, or borrowed: gives the times of the cost table, */
  double unit;        /* in so many seconds                                    */
  hcp_ask ask;
#define LIST(name, count) int32_t *name;
  HCP_LIMIT_LISTS(LIST)
#undef LIST
} request;

#define ONE_MORE(name) +1 /* NOLINT(bugprone-macro-parentheses): a term */
#define ONE_LIMIT(type, field, name) +1 /* NOLINT(bugprone-macro-parentheses): a term */
#define ONE_LIST(name, count) +1        /* NOLINT(bugprone-macro-parentheses): a term */
enum {
  PRICE_COUNT = 0 HCP_PRICES(ONE_MORE),
  LIMIT_COUNT = 0 HCP_LIMITS(ONE_LIMIT),
  LIMIT_LIST_COUNT = 0 HCP_LIMIT_LISTS(ONE_LIST)
};

#define REQUEST_KEYWORDS "lengths", "limits", "lists", "prices", "table", "pairs"
#define REQUEST_FORMAT "OOOOOO"

/* Fills *r, or leaves nothing to release and an exception. */
int hcp_py_request_fill(request *r, PyObject *lengths, PyObject *limits, PyObject *lists,
                        PyObject *prices, PyObject *cost_table, PyObject *pairs);
void hcp_py_request_release(request *r);

/* hcp_py_drop_gil for a search, which asks the request's function through it. */
void hcp_py_request_search(request *r, hcp_py_gil *gil);
/* Refuses a function where there is no search. Returns 0, or -1 with an exception set. */
int hcp_py_request_expect_times(const request *r);

/* The cost's parts alone; the caller releases the request. */
int hcp_py_fill_prices(hcp_cost *cost, PyObject *tuple);
int hcp_py_fill_cost_table(request *r, PyObject *cost_table);

#endif
