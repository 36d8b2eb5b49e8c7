#include "connector/silence.h"

#include "connector/clock.h"
#include "connector/runtime.h"

enum { LOOKS = 8 };

uint64_t cg_silence_ns(cg_silence *s, uint64_t answered_ns)
{
    const cg_link_meter *meter = &cg_runtime_speeds(s->runtime)->meter;
    if (s->answered_ns != answered_ns) {
        s->answered_ns = s->alive_ns = answered_ns;
        s->came_bytes = meter->came_bytes;
        s->largest_bytes = 0;
    }
    if (meter->under_way_bytes > s->largest_bytes)
        s->largest_bytes = meter->under_way_bytes;
    if (meter->came_ns > s->alive_ns &&
        meter->came_bytes - s->came_bytes <= CG_FEW_ROUND_TRIPS * s->largest_bytes)
        s->alive_ns = meter->came_ns;
    cg_runtime_speeds_end(s->runtime);
    return s->alive_ns + s->silence_ns;
}

uint64_t cg_silence_look_ns(const cg_silence *s, uint64_t end_ns)
{
    const uint64_t look_ns = cg_now_ns() + s->silence_ns / LOOKS + 1;
    return look_ns < end_ns ? look_ns : end_ns;
}
