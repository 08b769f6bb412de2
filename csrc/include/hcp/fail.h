/* fail.h - errors that the library's own files return. Callers do not use this. */
#ifndef HCP_FAIL_H
#define HCP_FAIL_H

#include "hcp/hcp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills *err (when there is one) and returns status, so that a check, its
 * status and its message are one statement. */
hcp_status hcp__fail(hcp_error *err, hcp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
#ifdef __clang_analyzer__
/* It looks at one file at a time and cannot see that status comes back. */
#define hcp__fail(err, status, ...) ((hcp__fail)(err, status, __VA_ARGS__), (status))
#endif

#ifdef __cplusplus
}
#endif

#endif
