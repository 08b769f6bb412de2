/* grid.c - the ranks that form tp, pp, cp, dp and other groups for a job layout. */
#include <string.h>

#include "internal.h"

const char *hcp_dimension_name(hcp_dimension dimension) {
  switch (dimension) {
#define DIMENSION_NAME(name, text) \
  case HCP_DIMENSION_##name:       \
    return text;
    HCP_DIMENSIONS(DIMENSION_NAME)
#undef DIMENSION_NAME
    case HCP_DIMENSION_COUNT:
      break;
  }
  return NULL;
}

/* HCP_DIMENSION_COUNT when no dimension has this name. */
static hcp_dimension find_dimension(const char *name, size_t length) {
  for (hcp_dimension d = 0; d < HCP_DIMENSION_COUNT; d++) {
    const char *known = hcp_dimension_name(d);
    if (strlen(known) == length && memcmp(known, name, length) == 0) return d;
  }
  return HCP_DIMENSION_COUNT;
}

/* Splits names at separator into dimensions, each at most once, and returns how
 * many; 0 when a name is unknown, empty or repeated. */
static int32_t parse_dimensions(const char *names, char separator,
                                hcp_dimension dimensions[HCP_DIMENSION_COUNT]) {
  int32_t seen[HCP_DIMENSION_COUNT] = {0};
  int32_t count = 0;
  for (;;) {
    const char *end = strchr(names, separator);
    size_t length = end != NULL ? (size_t)(end - names) : strlen(names);
    hcp_dimension d = find_dimension(names, length);
    if (d == HCP_DIMENSION_COUNT || seen[d]) return 0;
    seen[d] = 1;
    dimensions[count++] = d;
    if (end == NULL) return count;
    names = end + 1;
  }
}

hcp_status hcp_grid_init(const int32_t sizes[HCP_DIMENSION_COUNT], const char *order,
                         hcp_grid *grid, hcp_error *err) {
  hcp_grid made = {.ranks = 1};
  if (parse_dimensions(order, '-', made.order) != HCP_DIMENSION_COUNT)
    return hcp__fail(err, HCP_INVALID,
                     "order is \"%.60s\", expected tp, cp, dp and pp, each once, joined by '-', "
                     "such as \"tp-cp-dp-pp\"",
                     order);
  for (hcp_dimension d = 0; d < HCP_DIMENSION_COUNT; d++) {
    if (sizes[d] < 1)
      return hcp__fail(err, HCP_INVALID, "%s is %d, expected >= 1", hcp_dimension_name(d),
                       sizes[d]);
    if (sizes[d] > INT32_MAX / made.ranks)
      return hcp__fail(err, HCP_OVERFLOW,
                       "tp * cp * dp * pp is more ranks than 2147483647 at %s = %d",
                       hcp_dimension_name(d), sizes[d]);
    made.sizes[d] = sizes[d];
    made.ranks *= sizes[d];
  }
  *grid = made;
  return HCP_OK;
}

/* The dimensions of a role on one grid, fastest first. */
typedef struct axes {
  int32_t count;
  int32_t group_size;
  int32_t strides[HCP_DIMENSION_COUNT];
  int32_t sizes[HCP_DIMENSION_COUNT];
} axes;

static void axes_take(axes *taken, int32_t stride, int32_t size) {
  taken->strides[taken->count] = stride;
  taken->sizes[taken->count] = size;
  taken->count++;
  taken->group_size *= size;
}

static hcp_status axes_of_role(const hcp_grid *grid, const char *role, axes *out, hcp_error *err) {
  hcp_dimension named[HCP_DIMENSION_COUNT];
  int32_t wanted[HCP_DIMENSION_COUNT] = {0};
  int32_t count = parse_dimensions(role, '_', named);
  if (count == 0)
    return hcp__fail(err, HCP_INVALID,
                     "role is \"%.60s\", expected tp, cp, dp, pp or several of them, each once, "
                     "joined by '_', such as \"dp_cp\"",
                     role);
  for (int32_t i = 0; i < count; i++) wanted[named[i]] = 1;
  *out = (axes){.group_size = 1};
  int32_t stride = 1;
  for (int32_t i = 0; i < HCP_DIMENSION_COUNT; i++) {
    hcp_dimension d = grid->order[i];
    if (wanted[d]) axes_take(out, stride, grid->sizes[d]);
    stride *= grid->sizes[d];
  }
  return HCP_OK;
}

/* The lowest rank of the group that rank is in. */
static int32_t first_of_group(const axes *role, int32_t rank) {
  int32_t first = rank;
  for (int32_t i = 0; i < role->count; i++)
    first -= rank / role->strides[i] % role->sizes[i] * role->strides[i];
  return first;
}

/* Members ascend with their number because a stride is larger than all that
 * faster dimensions together can add. */
static int32_t member_of_group(const axes *role, int32_t first, int32_t member) {
  int32_t rank = first;
  for (int32_t i = 0; i < role->count; i++) {
    rank += member % role->sizes[i] * role->strides[i];
    member /= role->sizes[i];
  }
  return rank;
}

hcp_status hcp_grid_groups(const hcp_grid *grid, const char *role, int32_t *ranks_out,
                           int32_t *group_count, int32_t *group_size, hcp_error *err) {
  axes of_role;
  hcp_status status = axes_of_role(grid, role, &of_role, err);
  if (status != HCP_OK) return status;
  int32_t filled = 0;
  for (int32_t rank = 0; rank < grid->ranks; rank++) {
    if (first_of_group(&of_role, rank) != rank) continue;
    for (int32_t member = 0; member < of_role.group_size; member++)
      ranks_out[filled++] = member_of_group(&of_role, rank, member);
  }
  *group_count = grid->ranks / of_role.group_size;
  *group_size = of_role.group_size;
  return HCP_OK;
}

hcp_status hcp_grid_shares(const hcp_grid *a, const hcp_grid *b, const char *role, int32_t *same,
                           hcp_error *err) {
  axes in_a;
  axes in_b;
  if (a->ranks != b->ranks)
    return hcp__fail(err, HCP_INVALID, "the grids have %d and %d ranks, expected the same",
                     a->ranks, b->ranks);
  hcp_status status = axes_of_role(a, role, &in_a, err);
  if (status != HCP_OK) return status;
  status = axes_of_role(b, role, &in_b, err);
  if (status != HCP_OK) return status;
  /* Two divisions of the same ranks are equal when every rank has the same
   * lowest companion in both. */
  int32_t rank = 0;
  while (rank < a->ranks && first_of_group(&in_a, rank) == first_of_group(&in_b, rank)) rank++;
  *same = rank == a->ranks;
  return HCP_OK;
}
