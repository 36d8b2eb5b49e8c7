// tests/connector/watch.h - what is left of a connector: its threads and descriptors, as the kernel
// counts them.
#ifndef CG_TESTS_CONNECTOR_WATCH_H
#define CG_TESTS_CONNECTOR_WATCH_H
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

namespace cg_test
{

inline size_t n_entries(const char *folder)
{
    const std::filesystem::directory_iterator all(folder);
    return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// Whether it comes true in time.
template <typename Condition> bool comes_true(Condition condition)
{
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition()) { // once it was true it is not asked again: asking may change things
        if (std::chrono::steady_clock::now() >= deadline)
            return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

// What the descriptors of this process are.
inline std::string descriptors()
{
    std::string found;
    std::error_code gone; // it may be closed meanwhile
    for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd"))
        found += std::filesystem::read_symlink(entry.path(), gone).string() + " ";
    return found;
}

// The library's threads in this process by name, and where in the kernel each is.
inline std::string our_threads()
{
    std::string found;
    for (const auto &entry : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name, channel, call;
        std::ifstream(entry.path() / "comm") >> name;
        if (name.substr(0, 9) != "cachegen-")
            continue;
        std::ifstream(entry.path() / "wchan") >> channel;
        std::ifstream(entry.path() / "syscall") >> call;
        found += name + " (" + channel + ", system call " + call + ") ";
    }
    return found;
}

} // namespace cg_test
#endif
