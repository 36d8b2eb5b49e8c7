#include "fusefs/places.h"

#include "iouring/tree.h"

#include <string.h>

enum { MAX_DEPTH = 4 };

static bool equals(const char *component, const char *text)
{
    const size_t n_bytes = strlen(text);
    return strncmp(component, text, n_bytes) == 0 &&
           (component[n_bytes] == '/' || component[n_bytes] == '\0');
}

bool cg_place_is_folder_of_rules(const char *path)
{
    const char *component[MAX_DEPTH] = {path};
    int depth = 1;
    if (path[0] == '.' || path[0] == '\0') /* no model has such a name */
        return false;
    for (const char *at = path; (at = strchr(at, '/')) != NULL; at++) {
        if (depth == MAX_DEPTH)
            return false;
        component[depth++] = at + 1;
    }
    if (depth == 1)
        return true;
    if (equals(component[1], "objects"))
        return true;
    if (equals(component[1], "profiles"))
        return depth == 2;
    return equals(component[1], "contexts") &&
           (depth < 4 || (component[3][0] == 'L' && strlen(component[3]) == 2));
}
