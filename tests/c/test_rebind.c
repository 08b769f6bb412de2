/* test_rebind.c - slots over two pointers: all or none, undone exactly. */
#include "check.h"
#include "hcp/hcp.h"

enum { SLOTS = 5 };

/* A value counts its references; a world is five slots and its planned faults. */
typedef struct value {
  int references;
} value;

typedef struct world {
  value *slots[SLOTS];
  int fail_get_at; /* -1: never */
  int fail_set_at;
  int fail_undo_at; /* a set of a value that an old slot held */
  value *before;
  hcp_rebinding *reenter;
  int sets;
} world;

static int32_t world_get(void *context, int32_t i, void **out) {
  world *w = context;
  if (i == w->fail_get_at) return 1;
  if (w->slots[i] != NULL) w->slots[i]->references++;
  *out = w->slots[i];
  return 0;
}

static int is_before(const world *w, const value *v) {
  return v == NULL || (v >= w->before && v < w->before + SLOTS);
}

static int32_t world_set(void *context, int32_t i, void *new_value) {
  world *w = context;
  int undoing = is_before(w, new_value);
  w->sets++;
  if (w->reenter != NULL) CHECK_INT(hcp_rebinding_restore(w->reenter, NULL), HCP_OK);
  if (i == (undoing ? w->fail_undo_at : w->fail_set_at)) return 1;
  if (w->slots[i] != NULL) w->slots[i]->references--;
  w->slots[i] = new_value;
  if (w->slots[i] != NULL) w->slots[i]->references++;
  return 0;
}

static void world_release(void *context, void *old) {
  (void)context;
  if (old != NULL) ((value *)old)->references--;
}

typedef struct scene {
  value before[SLOTS];
  value after[SLOTS];
  void *values[SLOTS];
  world w;
  hcp_slots slots;
} scene;

static void scene_start(scene *s) {
  memset(s, 0, sizeof *s);
  s->w.fail_get_at = s->w.fail_set_at = s->w.fail_undo_at = -1;
  s->w.before = s->before;
  for (int i = 0; i < SLOTS; i++) {
    s->w.slots[i] = &s->before[i];
    s->before[i].references = 1;
    s->values[i] = &s->after[i];
  }
  s->slots = (hcp_slots){world_get, world_set, world_release, &s->w};
}

static void check_holds(const scene *s, const value *expected) {
  const value *other = expected == s->before ? s->after : s->before;
  for (int i = 0; i < SLOTS; i++) {
    CHECK(s->w.slots[i] == &expected[i]);
    CHECK_INT(expected[i].references, 1);
    CHECK_INT(other[i].references, 0);
  }
}

static void a_switch_is_restored(void) {
  scene s;
  hcp_rebinding *r = NULL;
  scene_start(&s);
  CHECK_INT(hcp_rebinding_create(&s.slots, s.values, SLOTS, &r, NULL), HCP_OK);
  CHECK_INT(hcp_rebinding_pending(r), SLOTS);
  for (int i = 0; i < SLOTS; i++) {
    CHECK(s.w.slots[i] == &s.after[i]);
    CHECK(hcp_rebinding_held(r, i) == &s.before[i]);
    CHECK_INT(s.before[i].references, 1);
  }
  CHECK(hcp_rebinding_held(r, SLOTS) == NULL);
  CHECK(hcp_rebinding_held(r, -1) == NULL);
  CHECK_INT(hcp_rebinding_restore(r, NULL), HCP_OK);
  CHECK_INT(hcp_rebinding_pending(r), 0);
  check_holds(&s, s.before);
  s.w.sets = 0;
  CHECK_INT(hcp_rebinding_restore(r, NULL), HCP_OK);
  CHECK_INT(s.w.sets, 0);
  hcp_rebinding_destroy(r);
}

static void a_fault_at_any_slot_leaves_all_as_it_was(void) {
  for (int k = 0; k < SLOTS; k++)
    for (int in_get = 0; in_get < 2; in_get++) {
      scene s;
      hcp_error err = {0};
      hcp_rebinding *r = NULL;
      char expected[32];
      scene_start(&s);
      if (in_get)
        s.w.fail_get_at = k;
      else
        s.w.fail_set_at = k;
      CHECK_INT(hcp_rebinding_create(&s.slots, s.values, SLOTS, &r, &err), HCP_CALLBACK);
      snprintf(expected, sizeof expected, "slot %d of %d failed", k, SLOTS);
      CHECK_TEXT(err.message, expected);
      CHECK(r == NULL);
      check_holds(&s, s.before);
    }
}

static void a_fault_while_undoing_is_named_and_stops_no_other(void) {
  scene s;
  hcp_error err = {0};
  hcp_rebinding *r = NULL;
  scene_start(&s);
  s.w.fail_set_at = 4;
  s.w.fail_undo_at = 2;
  CHECK_INT(hcp_rebinding_create(&s.slots, s.values, SLOTS, &r, &err), HCP_CALLBACK);
  CHECK_TEXT(err.message, "slot 4 of 5 failed, and slot 2 failed");
  for (int i = 0; i < SLOTS; i++) CHECK(s.w.slots[i] == (i == 2 ? &s.after[i] : &s.before[i]));
  CHECK_INT(s.before[2].references, 0);
}

static void a_fault_while_restoring_stops_no_other(void) {
  for (int k = 0; k < SLOTS; k++) {
    scene s;
    hcp_error err = {0};
    hcp_rebinding *r = NULL;
    char expected[32];
    scene_start(&s);
    CHECK_INT(hcp_rebinding_create(&s.slots, s.values, SLOTS, &r, NULL), HCP_OK);
    s.w.fail_undo_at = k;
    CHECK_INT(hcp_rebinding_restore(r, &err), HCP_CALLBACK);
    snprintf(expected, sizeof expected, "slot %d failed", k);
    CHECK_TEXT(err.message, expected);
    CHECK_INT(hcp_rebinding_pending(r), 0);
    for (int i = 0; i < SLOTS; i++) CHECK(s.w.slots[i] == (i == k ? &s.after[i] : &s.before[i]));
    hcp_rebinding_destroy(r);
  }
}

static void nested_switches_unwind(void) {
  scene s;
  hcp_rebinding *r = NULL;
  value twin = {0};
  scene_start(&s);
  CHECK_INT(hcp_rebinding_create(&s.slots, s.values, 1, &r, NULL), HCP_OK);
  hcp_rebinding *inner = NULL;
  CHECK_INT(hcp_rebinding_create(&s.slots, (void *[]){&twin}, 1, &inner, NULL), HCP_OK);
  CHECK(s.w.slots[0] == &twin);
  CHECK_INT(hcp_rebinding_restore(inner, NULL), HCP_OK);
  CHECK(s.w.slots[0] == &s.after[0]);
  CHECK_INT(hcp_rebinding_restore(r, NULL), HCP_OK);
  check_holds(&s, s.before);
  hcp_rebinding_destroy(inner);
  hcp_rebinding_destroy(r);
}

static void a_slot_that_held_nothing_holds_nothing_again(void) {
  scene s;
  hcp_rebinding *r = NULL;
  scene_start(&s);
  s.w.slots[1] = NULL;
  CHECK_INT(hcp_rebinding_create(&s.slots, s.values, SLOTS, &r, NULL), HCP_OK);
  CHECK(s.w.slots[1] == &s.after[1]);
  CHECK_INT(hcp_rebinding_restore(r, NULL), HCP_OK);
  CHECK(s.w.slots[1] == NULL);
  hcp_rebinding_destroy(r);
}

static void a_callback_that_restores_again_restores_once(void) {
  scene s;
  hcp_rebinding *r = NULL;
  scene_start(&s);
  CHECK_INT(hcp_rebinding_create(&s.slots, s.values, SLOTS, &r, NULL), HCP_OK);
  s.w.reenter = r;
  s.w.sets = 0;
  CHECK_INT(hcp_rebinding_restore(r, NULL), HCP_OK);
  CHECK_INT(s.w.sets, SLOTS);
  check_holds(&s, s.before);
  hcp_rebinding_destroy(r);
}

static void destroy_releases_without_restoring(void) {
  scene s;
  hcp_rebinding *r = NULL;
  scene_start(&s);
  CHECK_INT(hcp_rebinding_create(&s.slots, s.values, SLOTS, &r, NULL), HCP_OK);
  hcp_rebinding_destroy(r);
  check_holds(&s, s.after);
  hcp_rebinding_destroy(NULL);
  CHECK_INT(hcp_rebinding_pending(NULL), 0);
}

static void no_slots_is_a_switch_too(void) {
  scene s;
  hcp_error err = {0};
  hcp_rebinding *r = NULL;
  scene_start(&s);
  CHECK_INT(hcp_rebinding_create(&s.slots, NULL, 0, &r, NULL), HCP_OK);
  CHECK_INT(hcp_rebinding_restore(r, NULL), HCP_OK);
  hcp_rebinding_destroy(r);
  CHECK_INT(hcp_rebinding_create(&s.slots, NULL, -1, &r, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "n is -1, expected >= 0");
}

int main(void) {
  a_switch_is_restored();
  a_fault_at_any_slot_leaves_all_as_it_was();
  a_fault_while_undoing_is_named_and_stops_no_other();
  a_fault_while_restoring_stops_no_other();
  nested_switches_unwind();
  a_slot_that_held_nothing_holds_nothing_again();
  a_callback_that_restores_again_restores_once();
  destroy_releases_without_restoring();
  no_slots_is_a_switch_too();
  return check_report("test_rebind");
}
