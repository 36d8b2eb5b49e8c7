// How long a look-up of a long prompt takes of which all is stored: 131,072 tokens in 512 chunks of
// three levels each, by a connector that remembers nothing of the look-up before.
//
// usage: lookup_bench DIR [MOUNT]
//
// DIR: an empty directory, which the store is made in; one that this program has made is used
// again. MOUNT: where look-ups reach it instead. What is in the chunks is small and of no meaning:
// a look-up does not see it. Prints milliseconds from a look-up's start to its answer, and CPU time
// with that of the kernel's threads for it: of the first one, which begins threads and takes
// memory, and of 31 more.
#include "tests/connector/engine.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace
{

using namespace cg_test;
using Clock = std::chrono::steady_clock;

constexpr uint32_t N_TOKENS = 131072;
const std::string CONFIG =
    "\"chunk_tokens\": 256, \"staging_mib\": 4096, \"lookup_timeout_ms\": 60000";

void fail(const std::string &what)
{
    fprintf(stderr, "lookup_bench: %s\n", what.c_str());
    exit(1);
}

void make_store(const std::string &root, const Store &like, const Tokens &tokens)
{
    std::filesystem::copy(like.dir.path + "/m", root + "/m",
                          std::filesystem::copy_options::recursive);
    Engine engine(root, like.spec, CONFIG);
    const std::vector<int64_t> few = engine.table;
    engine.table.clear();
    for (size_t i = 0; i <= N_TOKENS / Engine::BLOCK_TOKENS; i++)
        engine.table.push_back(few[i % few.size()]);
    cachegen_save *op;
    if (engine.save_start(tokens, 0, N_TOKENS, true, nullptr, 0, &op) != CACHEGEN_OK ||
        engine.finish(op).loaded_tokens != N_TOKENS)
        fail("the store could not be made");
}

double cpu_ms()
{
    rusage used = {};
    getrusage(RUSAGE_SELF, &used);
    return (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e3 +
           (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e3;
}

void time_look_ups(const std::string &root, const Store &like, const Tokens &tokens,
                   const std::string &backend)
{
    std::vector<double> ms, cpu;
    Engine engine(root, like.spec, CONFIG + ", \"io_backend\": \"" + backend + "\"");
    if (engine.open_status != CACHEGEN_OK)
        fail(engine.error);
    for (int i = 0; i < 32; i++) {
        const Clock::time_point start = Clock::now();
        const double cpu_before = cpu_ms();
        const cachegen_hit hit = engine.look_up(tokens);
        ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
        cpu.push_back(cpu_ms() - cpu_before);
        if (hit.stored_tokens != N_TOKENS - 1)
            fail("found " + std::to_string(hit.stored_tokens) + " tokens");
    }
    const double first_ms = ms[0], first_cpu = cpu[0];
    ms.erase(ms.begin());
    cpu.erase(cpu.begin());
    std::sort(ms.begin(), ms.end());
    std::sort(cpu.begin(), cpu.end());
    printf("%-8s first %.1f ms, CPU %.1f; then median %.1f, min %.1f, max %.1f; CPU %.1f\n",
           backend.c_str(), first_ms, first_cpu, ms[15], ms[0], ms[30], cpu[15]);
}

} // namespace

int main(int argc, char **argv)
try {
    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: lookup_bench DIR [MOUNT]\n");
        return 2;
    }
    const std::string root = argv[1];
    const Tokens tokens = prompt(N_TOKENS);
    const Store like(true);
    if (!std::filesystem::exists(root + "/m"))
        make_store(root, like, tokens);
    for (const char *backend : {"auto", "io_uring", "threads"})
        time_look_ups(argc == 3 ? argv[2] : root, like, tokens, backend);
    return 0;
} catch (const std::exception &error) {
    fprintf(stderr, "lookup_bench: %s\n", error.what());
    return 2;
}
