/* internal.h - what the core's files share. */
#ifndef HCP_CORE_INTERNAL_H
#define HCP_CORE_INTERNAL_H

#include "hcp/hcp.h"

/* Fills *err (when there is one) and returns status, so that a check, its
 * status and its message are one statement. */
hcp_status hcp__fail(hcp_error *err, hcp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
