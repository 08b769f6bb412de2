/* status.c - the status and the message that every call returns. */
#include <stdarg.h>
#include <stdio.h>

#include "hcp/fail.h"

const char *hcp_status_name(hcp_status status) {
  switch (status) {
#define STATUS_NAME(name, text) \
  case HCP_##name:              \
    return #name;
    HCP_STATUS_MAP(STATUS_NAME)
#undef STATUS_NAME
  }
  return "UNKNOWN";
}

const char *hcp_status_text(hcp_status status) {
  switch (status) {
#define STATUS_TEXT(name, text) \
  case HCP_##name:              \
    return text;
    HCP_STATUS_MAP(STATUS_TEXT)
#undef STATUS_TEXT
  }
  return "unknown status";
}

hcp_status(hcp__fail)(hcp_error *err, hcp_status status, const char *format, ...) {
  if (err == NULL) return status;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(err->message, sizeof err->message, format, arguments);
  va_end(arguments);
  err->status = status;
  return status;
}
