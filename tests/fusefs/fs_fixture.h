// tests/fusefs/fs_fixture.h - a file system core over a temporary store, used by path, not node.
#ifndef CG_TESTS_FUSEFS_FS_FIXTURE_H
#define CG_TESTS_FUSEFS_FS_FIXTURE_H
#include "fusefs/core.h"
#include "fusefs/open_files.h"
#include "iouring/tree.h"
#include "tests/iouring/chunk_maker.h"
#include "tests/iouring/temp_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

namespace cg_test
{

using Bytes = std::vector<uint8_t>;

// One mount of a store; several may be open at once.
class Fs
{
  public:
    explicit Fs(const std::string &store, bool read_only = false, uint64_t quota_bytes = 0,
                uint64_t max_user_files = 0)
        : Fs(store, make_config(read_only, quota_bytes, max_user_files))
    {
    }
    Fs(const std::string &store, cg_fs_config config)
    {
        config.store = store.c_str();
        config.config_text = "a = b\n";
        config.log = [](void *self, cg_log_level, const char *line) {
            const std::lock_guard<std::mutex> hold(static_cast<Fs *>(self)->lock_);
            static_cast<Fs *>(self)->log_ += std::string(line) + "\n";
        };
        config.log_user = this;
        if (cg_fs_new(&config, &fs) != 0)
            throw std::runtime_error("cg_fs_new");
    }
    ~Fs()
    {
        for (cg_fs_node *node : looked_up_)
            cg_fs_forget(fs, node, 1);
        cg_fs_free(fs);
    }
    Fs(const Fs &) = delete;
    Fs &operator=(const Fs &) = delete;

    // The node of a path, or nullptr and *error.
    cg_fs_node *find(const std::string &path, int *error = nullptr)
    {
        cg_fs_node *node = cg_fs_root(fs);
        for (size_t at = 0; at < path.size();) {
            const size_t end = std::min(path.find('/', at), path.size());
            cg_fs_entry entry;
            const int result =
                cg_fs_lookup(fs, &caller, node, path.substr(at, end - at).c_str(), &entry);
            if (error != nullptr)
                *error = result;
            if (result != 0)
                return nullptr;
            node = keep(entry.node);
            at = end + 1;
        }
        return node;
    }
    int look(const std::string &path)
    {
        int error = 0;
        find(path, &error);
        return error;
    }
    cg_fs_node *parent_of(const std::string &path)
    {
        const size_t slash = path.rfind('/');
        return find(slash == std::string::npos ? "" : path.substr(0, slash));
    }
    static std::string leaf_of(const std::string &path)
    {
        return path.substr(path.rfind('/') + 1);
    }

    int mkdir(const std::string &path)
    {
        cg_fs_entry entry;
        const int error =
            cg_fs_mkdir(fs, &caller, parent_of(path), leaf_of(path).c_str(), 0755, &entry);
        if (error == 0)
            keep(entry.node);
        return error;
    }
    void mkdirs(const std::string &path)
    {
        for (size_t end = path.find('/'); end != std::string::npos; end = path.find('/', end + 1))
            mkdir(path.substr(0, end));
        mkdir(path);
    }
    int create(const std::string &path, cg_fs_file **file_out, int flags = O_WRONLY)
    {
        cg_fs_entry entry;
        cg_fs_node *parent = parent_of(path);
        if (parent == nullptr)
            return ENOENT; /* moved away by another thread */
        const int error =
            cg_fs_create(fs, &caller, parent, leaf_of(path).c_str(), 0644, flags, &entry, file_out);
        if (error == 0)
            keep(entry.node);
        return error;
    }
    int write(cg_fs_file *file, const Bytes &bytes, off_t offset = 0)
    {
        Bytes source = bytes;
        size_t n = 0;
        const int error = cg_fs_write(fs, file, offset, write_all, &source, &n);
        EXPECT_EQ(n, error == 0 ? bytes.size() : 0);
        return error;
    }
    int read(cg_fs_file *file, void *bytes, size_t n_bytes, off_t offset, size_t *n_read_out)
    {
        cg_fs_bytes found;
        cg_fs_read(fs, file, offset, n_bytes, &found);
        *n_read_out = found.n_bytes;
        if (found.text != nullptr) {
            memcpy(bytes, found.text, found.n_bytes);
            return 0;
        }
        const ssize_t n = pread(found.fd, bytes, found.n_bytes, found.offset);
        *n_read_out = n < 0 ? 0 : static_cast<size_t>(n);
        return n < 0 ? errno : 0;
    }
    int close(cg_fs_file *file)
    {
        const int error = cg_fs_flush(fs, file);
        cg_fs_release(fs, file);
        return error;
    }
    // As cp does; the first error.
    int put(const std::string &path, const Bytes &bytes)
    {
        cg_fs_file *file;
        int error = create(path, &file);
        if (error == ESTALE) // it is there: the kernel looks it up
            error = open(path, O_WRONLY | O_TRUNC, &file);
        if (error != 0)
            return error;
        const int written = write(file, bytes), closed = close(file);
        return written != 0 ? written : closed;
    }
    int open(const std::string &path, int flags, cg_fs_file **file_out)
    {
        int error = 0;
        cg_fs_node *node = find(path, &error);
        return node == nullptr ? error : cg_fs_open(fs, &caller, node, flags, file_out);
    }
    Bytes get(const std::string &path)
    {
        cg_fs_file *file;
        Bytes bytes(1 << 20);
        size_t n = 0;
        if (open(path, O_RDONLY, &file) != 0)
            return {};
        EXPECT_EQ(read(file, bytes.data(), bytes.size(), 0, &n), 0);
        EXPECT_EQ(close(file), 0);
        bytes.resize(n);
        return bytes;
    }
    int rename(const std::string &from, const std::string &to, unsigned flags = 0)
    {
        cg_fs_node *parent = parent_of(from), *new_parent = parent_of(to);
        if (parent == nullptr || new_parent == nullptr)
            return ENOENT;
        return cg_fs_rename(fs, &caller, parent, leaf_of(from).c_str(), new_parent,
                            leaf_of(to).c_str(), flags);
    }
    int link(const std::string &from, const std::string &to)
    {
        cg_fs_entry entry;
        const int error = cg_fs_link(fs, find(from), parent_of(to), leaf_of(to).c_str(), &entry);
        if (error == 0)
            keep(entry.node);
        return error;
    }
    int symlink(const std::string &target, const std::string &path)
    {
        cg_fs_entry entry;
        const int error = cg_fs_symlink(fs, &caller, target.c_str(), parent_of(path),
                                        leaf_of(path).c_str(), &entry);
        if (error == 0)
            keep(entry.node);
        return error;
    }
    int unlink(const std::string &path)
    {
        cg_fs_node *parent = parent_of(path);
        return parent == nullptr ? ENOENT
                                 : cg_fs_unlink(fs, &caller, parent, leaf_of(path).c_str());
    }
    int rmdir(const std::string &path)
    {
        return cg_fs_rmdir(fs, parent_of(path), leaf_of(path).c_str());
    }
    int truncate(const std::string &path, off_t size)
    {
        struct stat attr = {};
        attr.st_size = size;
        return cg_fs_setattr(fs, find(path), &attr, CG_SET_SIZE, &attr);
    }
    std::vector<std::string> list(const std::string &path)
    {
        std::vector<std::string> names;
        cg_fs_directory *directory;
        if (cg_fs_opendir(fs, &caller, find(path), &directory) != 0)
            return {"not a directory"};
        const struct dirent *entry;
        for (off_t at = 0, next = 0;
             cg_fs_readdir(fs, directory, at, &entry, &next) == 0 && entry != nullptr; at = next)
            if (entry->d_name[0] != '.' || entry->d_name[1] == 'c')
                names.push_back(entry->d_name);
        cg_fs_closedir(directory);
        std::sort(names.begin(), names.end());
        return names;
    }
    // A number of .cachegenfs/metrics.
    uint64_t metric(const std::string &name)
    {
        const Bytes bytes = get(".cachegenfs/metrics");
        const std::string text = "\n" + std::string(bytes.begin(), bytes.end());
        const size_t at = text.find("\ncachegenfs_" + name + " ");
        return at == std::string::npos ? UINT64_MAX
                                       : std::stoull(text.substr(at + name.size() + 13));
    }
    std::string log()
    {
        const std::lock_guard<std::mutex> hold(lock_);
        return log_;
    }

    cg_fs *fs = nullptr;
    cg_fs_caller caller = {geteuid(), getegid(), getpid()};

  private:
    static cg_fs_config make_config(bool read_only, uint64_t quota_bytes, uint64_t max_user_files)
    {
        cg_fs_config config = {};
        config.read_only = read_only;
        config.quota_bytes = quota_bytes;
        config.max_user_files = max_user_files;
        return config;
    }
    static ssize_t write_all(void *source, int fd, off_t offset)
    {
        const Bytes &bytes = *static_cast<const Bytes *>(source);
        const ssize_t n = pwrite(fd, bytes.data(), bytes.size(), offset);
        return n < 0 ? -errno : n;
    }
    cg_fs_node *keep(cg_fs_node *node)
    {
        const std::lock_guard<std::mutex> hold(lock_);
        looked_up_.push_back(node);
        return node;
    }
    std::mutex lock_;
    std::vector<cg_fs_node *> looked_up_;
    std::string log_;
};

class FsTest : public testing::Test
{
  protected:
    void SetUp() override
    {
        fs.mkdirs(L1);
    }

    // What an object of this chunk is called.
    static std::string object_of(const Chunk &chunk)
    {
        char path[CG_TREE_PATH_BYTES];
        EXPECT_EQ(cg_tree_object_path("m", &chunk.header.key,
                                      static_cast<cg_level>(chunk.header.level),
                                      &chunk.header.profile, path, sizeof path),
                  CG_OK);
        return path;
    }

    const std::string L1 = "m/contexts/c/L1", CHUNK = L1 + "/00000.kv";
    const cg_fingerprint profile = fingerprint_of("a profile");
    const Chunk chunk = make_chunk(nullptr, draw_tokens(16, 1), CG_L1, &profile);
    const Chunk other = make_chunk(nullptr, draw_tokens(16, 2), CG_L1, &profile);
    TempDir store;
    Fs fs{store.path};
};

} // namespace cg_test
#endif
