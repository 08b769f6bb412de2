/* rebind.c - slots swapped all or none: an undo log over two callbacks. */
#include <stdlib.h>

#include "internal.h"

struct hcp_rebinding {
  hcp_slots slots;
  int32_t pending;
  void *held[]; /* held[i] for i < pending */
};

/* Takes the last slot off the log before the callback runs, so that a callback
 * that restores again finds it done. */
static int32_t restore_last(hcp_rebinding *rebinding) {
  const hcp_slots *slots = &rebinding->slots;
  int32_t i = --rebinding->pending;
  void *value = rebinding->held[i];
  int32_t failed = slots->set(slots->context, i, value);
  slots->release(slots->context, value);
  return failed;
}

/* The first slot that failed, or -1. */
static int32_t restore_all(hcp_rebinding *rebinding) {
  int32_t first_failed = -1;
  while (rebinding->pending > 0) {
    int32_t i = rebinding->pending - 1;
    if (restore_last(rebinding) != 0 && first_failed < 0) first_failed = i;
  }
  return first_failed;
}

static int32_t switch_next(hcp_rebinding *rebinding, void *new_value) {
  const hcp_slots *slots = &rebinding->slots;
  int32_t i = rebinding->pending;
  void *value = NULL;
  if (slots->get(slots->context, i, &value) != 0) return -1;
  if (slots->set(slots->context, i, new_value) != 0) {
    slots->release(slots->context, value);
    return -1;
  }
  rebinding->held[i] = value;
  rebinding->pending++;
  return 0;
}

static hcp_status undo(hcp_rebinding *rebinding, int32_t n, hcp_error *err) {
  int32_t failed = rebinding->pending;
  int32_t stuck = restore_all(rebinding);
  if (stuck >= 0)
    return hcp__fail(err, HCP_CALLBACK,
                     "slot %d of %d failed, and slot %d failed when it was to be undone: it may "
                     "hold its new value",
                     failed, n, stuck);
  return hcp__fail(err, HCP_CALLBACK, "slot %d of %d failed; every slot holds what it held", failed,
                   n);
}

hcp_status hcp_rebinding_create(const hcp_slots *slots, void *const *values, int32_t n,
                                hcp_rebinding **rebinding, hcp_error *err) {
  hcp_status status = HCP_OK;
  if (n < 0) return hcp__fail(err, HCP_INVALID, "n is %d, expected >= 0", n);
  hcp_rebinding *made = malloc(sizeof *made + (size_t)n * sizeof made->held[0]);
  if (made == NULL) return hcp__fail(err, HCP_NO_MEMORY, "no memory for %d slots", n);
  made->slots = *slots;
  made->pending = 0;
  while (made->pending < n) {
    if (switch_next(made, values[made->pending]) == 0) continue;
    status = undo(made, n, err);
    goto destroy;
  }
  *rebinding = made;
  return HCP_OK;
destroy:
  hcp_rebinding_destroy(made);
  return status;
}

hcp_status hcp_rebinding_restore(hcp_rebinding *rebinding, hcp_error *err) {
  int32_t failed = restore_all(rebinding);
  if (failed >= 0)
    return hcp__fail(err, HCP_CALLBACK,
                     "slot %d failed when it was to be restored: it may hold its new value",
                     failed);
  return HCP_OK;
}

int32_t hcp_rebinding_pending(const hcp_rebinding *rebinding) {
  return rebinding == NULL ? 0 : rebinding->pending;
}

void *hcp_rebinding_held(const hcp_rebinding *rebinding, int32_t i) {
  if (i < 0 || i >= hcp_rebinding_pending(rebinding)) return NULL;
  return rebinding->held[i];
}

void hcp_rebinding_destroy(hcp_rebinding *rebinding) {
  if (rebinding == NULL) return;
  while (rebinding->pending > 0)
    rebinding->slots.release(rebinding->slots.context, rebinding->held[--rebinding->pending]);
  free(rebinding);
}
