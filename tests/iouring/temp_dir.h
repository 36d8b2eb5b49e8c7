// tests/iouring/temp_dir.h - a directory of a test's own, and plain file access in it.
#ifndef CG_TESTS_IOURING_TEMP_DIR_H
#define CG_TESTS_IOURING_TEMP_DIR_H
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace cg_test
{

class TempDir
{
  public:
    TempDir()
    {
        const char *tmp = getenv("TMPDIR");
        std::string name = std::string(tmp != nullptr ? tmp : "/tmp") + "/cg_iouring_XXXXXX";
        if (mkdtemp(name.data()) == nullptr)
            throw std::runtime_error("mkdtemp");
        path = name;
        fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    ~TempDir()
    {
        close(fd);
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    TempDir(const TempDir &) = delete;
    TempDir &operator=(const TempDir &) = delete;

    void write(const std::string &name, const std::vector<uint8_t> &bytes) const
    {
        std::filesystem::create_directories(std::filesystem::path(path + "/" + name).parent_path());
        std::ofstream(path + "/" + name, std::ios::binary)
            .write(reinterpret_cast<const char *>(bytes.data()),
                   static_cast<std::streamsize>(bytes.size()));
    }
    void write(const std::string &name, const std::string &text) const
    {
        write(name, std::vector<uint8_t>(text.begin(), text.end()));
    }
    std::vector<uint8_t> read(const std::string &name) const
    {
        std::ifstream in(path + "/" + name, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    }
    std::string read_text(const std::string &name) const
    {
        const std::vector<uint8_t> bytes = read(name);
        return {bytes.begin(), bytes.end()};
    }
    bool has(const std::string &name) const
    {
        return std::filesystem::exists(path + "/" + name);
    }

    // Paths of all files below name, relative to the directory.
    std::vector<std::string> files(const std::string &name = "") const
    {
        std::vector<std::string> found;
        for (const auto &entry : std::filesystem::recursive_directory_iterator(path + "/" + name))
            if (!entry.is_directory())
                found.push_back(std::filesystem::relative(entry.path(), path).string());
        return found;
    }

    // How many descriptors this process has of what lies in the folder name, not further below.
    size_t n_open(const std::string &name) const
    {
        size_t n = 0;
        std::error_code gone;
        for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) {
            const auto to = std::filesystem::read_symlink(entry.path(), gone);
            n += to.parent_path() == path + "/" + name;
        }
        return n;
    }

    std::string path;
    int fd = -1;
};

} // namespace cg_test
#endif
