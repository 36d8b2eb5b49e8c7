#define FUSE_USE_VERSION 312
#include "tests/iouring/odd_fs.h"

#include <dirent.h>
#include <fcntl.h>
#include <fuse.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace cg_test
{

struct OddFs::State {
    int backing_fd = -1;
    struct fuse *fuse = nullptr;
    std::thread loop;
    std::mutex lock; // of all below
    std::condition_variable released_changed;
    bool is_far = false, is_serial = false;
    bool released = false;
    std::string held_call, held_part; // of the next call that is held; "": none
    Mood mood = Mood::GOOD;
    int n_waves = 0; // of answers to what hung
    int n_hanging = 0, n_calls = 0, n_rounds = 0, n_opens = 0;
    size_t most_asked = 0, n_asked = 0;
    std::set<int> open;                 // descriptors of files that are open through the mount
    std::map<std::string, int> n_stats; // by path
    std::map<std::string, int> calls;   // by kind
    std::set<std::string> lost;         // folders, relative to the backing
    std::set<std::string> listed;       // paths, if is_serial
};

namespace
{

int result_of(long result)
{
    return result < 0 ? -errno : static_cast<int>(result);
}
const char *below(const char *path)
{
    return path[1] == '\0' ? "." : path + 1;
}
bool is_named(const char *path, const char *what)
{
    return strstr(path, what) != nullptr;
}

} // namespace

struct OddFsCalls {
    static OddFs::State *state()
    {
        return static_cast<OddFs::State *>(fuse_get_context()->private_data);
    }

    static void hang()
    {
        OddFs::State *s = state();
        std::unique_lock<std::mutex> guard(s->lock);
        s->n_hanging++;
        s->released_changed.notify_all();
        s->released_changed.wait(guard, [s] { return s->released; });
        s->n_hanging--;
    }

    static void hang_if_held(const char *call, const char *path)
    {
        {
            const std::lock_guard<std::mutex> guard(state()->lock);
            if (state()->held_call != call || !is_named(path, state()->held_part.c_str()))
                return;
            state()->held_call.clear();
        }
        hang();
    }

    // libfuse itself asks for the status of what a call has made: no question of the kernel's.
    static bool is_about_new(const char *path, bool is_made)
    {
        thread_local std::string made;
        const bool was_made = made == path;
        made = is_made ? path : "";
        return was_made;
    }

    static bool is_listed(const char *path)
    {
        const std::lock_guard<std::mutex> guard(state()->lock);
        return state()->listed.count(path) > 0;
    }

    // Whoever finds that no call has come since it did lets all go on that wait.
    static void wait_for_round(OddFs::State *s, std::unique_lock<std::mutex> *guard)
    {
        const int round = s->n_rounds;
        int seen;
        do {
            seen = s->n_calls;
            s->released_changed.wait_for(*guard, std::chrono::milliseconds(50), [&] {
                return s->n_rounds != round || s->mood != Mood::IN_ROUNDS;
            });
        } while (s->n_calls != seen && s->n_rounds == round && s->mood == Mood::IN_ROUNDS);
        if (s->n_rounds == round) {
            s->n_rounds++;
            s->released_changed.notify_all();
        }
    }

    enum Kind { LOOKS, READS, CHANGES, ADDS };
    // What the mood makes of a call: 0, or an error.
    static int suffer(Kind kind, const char *call)
    {
        OddFs::State *s = state();
        std::unique_lock<std::mutex> guard(s->lock);
        s->n_calls++;
        s->calls[call]++;
        const Mood mood = s->mood;
        if (mood == Mood::HANGING || (mood == Mood::TRICKLING && kind == READS)) {
            s->n_hanging++;
            s->released_changed.notify_all();
            const int wave = s->n_waves;
            s->released_changed.wait(guard, [&] { return s->mood != mood || s->n_waves != wave; });
            s->n_hanging--;
        }
        if (s->mood == Mood::IN_ROUNDS)
            wait_for_round(s, &guard);
        if (s->mood == Mood::SLOW) {
            guard.unlock();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            return 0;
        }
        if (s->mood == Mood::FULL && kind == ADDS)
            return -ENOSPC;
        if (s->mood == Mood::READ_ONLY && kind > READS)
            return -EROFS;
        return s->mood == Mood::GONE ? -EIO : 0;
    }

    static int is_open(int fd, struct fuse_file_info *info)
    {
        info->fh = static_cast<uint64_t>(fd);
        const std::lock_guard<std::mutex> guard(state()->lock);
        state()->open.insert(fd);
        state()->n_opens++;
        return 0;
    }

    static void *init(struct fuse_conn_info *connection, struct fuse_config *)
    {
        if (state()->is_far) {
            connection->max_background = 2000;
            connection->want |= connection->capable & FUSE_CAP_PARALLEL_DIROPS;
        }
        if (state()->is_serial)
            connection->want &= ~static_cast<unsigned>(FUSE_CAP_PARALLEL_DIROPS);
        return state();
    }
    static bool is_lost(const std::string &path)
    {
        const std::lock_guard<std::mutex> guard(state()->lock);
        for (const std::string &folder : state()->lost)
            if (path.rfind(folder + "/", 0) == 0)
                return true;
        state()->lost.erase(path);
        return false;
    }
    static int getattr(const char *path, struct stat *out, struct fuse_file_info *)
    {
        const bool is_known = is_about_new(path, false) || is_listed(path);
        const int error = is_known ? 0 : suffer(LOOKS, "getattr");
        if (error != 0 || is_lost(below(path)))
            return error != 0 ? error : -ESTALE;
        if (is_known)
            return result_of(fstatat(state()->backing_fd, below(path), out, AT_SYMLINK_NOFOLLOW));
        if (is_named(path, "hang_stat"))
            hang();
        {
            const std::lock_guard<std::mutex> guard(state()->lock);
            state()->n_stats[below(path)]++;
        }
        const int result =
            result_of(fstatat(state()->backing_fd, below(path), out, AT_SYMLINK_NOFOLLOW));
        if (is_named(path, "timeless")) {
            out->st_atim = out->st_mtim = out->st_ctim = {};
            if (S_ISDIR(out->st_mode))
                out->st_size = 0;
        }
        return result;
    }
    static int mkdir(const char *path, mode_t mode)
    {
        if (const int error = suffer(ADDS, "mkdir"))
            return error;
        const int result = result_of(mkdirat(state()->backing_fd, below(path), mode));
        is_about_new(path, result == 0);
        return result;
    }
    static int unlink(const char *path)
    {
        if (const int error = suffer(CHANGES, "unlink"))
            return error;
        return result_of(unlinkat(state()->backing_fd, below(path), 0));
    }
    static int rename(const char *from, const char *to, unsigned flags)
    {
        if (const int error = suffer(CHANGES, "rename"))
            return error;
        hang_if_held("name", to);
        if (flags != 0)
            return -EINVAL;
        if (is_named(to, "views"))
            for (const char *part : {"-L2", "-L3", "/L2/", "/L3/"})
                if (is_named(to, part))
                    return is_named(to, "sshfs") ? -EPERM : -EXDEV;
        return result_of(
            renameat(state()->backing_fd, below(from), state()->backing_fd, below(to)));
    }
    static int link(const char *from, const char *to)
    {
        if (const int error = suffer(ADDS, "link"))
            return error;
        hang_if_held("name", to);
        if (is_named(from, "full"))
            return -EMLINK;
        if (!is_named(to, "links") && !state()->is_far)
            return -EPERM;
        const int result =
            result_of(linkat(state()->backing_fd, below(from), state()->backing_fd, below(to), 0));
        is_about_new(to, result == 0);
        return result;
    }
    static int open(const char *path, struct fuse_file_info *info)
    {
        if (const int error = suffer(LOOKS, "open"))
            return error;
        if (is_named(path, "hang_open"))
            hang();
        if (is_named(path, "nodirect") && (info->flags & O_DIRECT))
            return -EINVAL;
        const int fd =
            openat(state()->backing_fd, below(path), info->flags & ~(O_DIRECT | O_NOFOLLOW));
        if (fd < 0)
            return -errno;
        info->direct_io = is_named(path, "short"); // no page cache in between
        return is_open(fd, info);
    }
    static int create(const char *path, mode_t mode, struct fuse_file_info *info)
    {
        if (const int error = suffer(ADDS, "create"))
            return error;
        const int fd = openat(state()->backing_fd, below(path), info->flags & ~O_DIRECT, mode);
        if (fd < 0)
            return -errno;
        is_about_new(path, true);
        return is_open(fd, info);
    }
    static bool is_cut()
    {
        const std::lock_guard<std::mutex> guard(state()->lock);
        return state()->mood == Mood::CUT;
    }
    static int read(const char *path, char *bytes, size_t n, off_t offset,
                    struct fuse_file_info *info)
    {
        if (const int error = suffer(READS, "read"))
            return error;
        if (is_named(path, "hang_read"))
            hang();
        {
            const std::lock_guard<std::mutex> guard(state()->lock);
            state()->most_asked = std::max(state()->most_asked, n);
            state()->n_asked += n;
        }
        if (is_named(path, "latedirect") && (info->flags & O_DIRECT))
            return -EINVAL;
        if (is_named(path, "short"))
            n = std::min<size_t>(n, 1000);
        if (is_cut())
            n = std::min<size_t>(n, offset < 100 ? static_cast<size_t>(100 - offset) : 0);
        return result_of(pread(static_cast<int>(info->fh), bytes, n, offset));
    }
    static int write(const char *path, const char *bytes, size_t n, off_t offset,
                     struct fuse_file_info *info)
    {
        if (const int error = suffer(ADDS, "write"))
            return error;
        if (is_named(path, "hang_write"))
            hang();
        hang_if_held("write", path);
        return result_of(pwrite(static_cast<int>(info->fh), bytes, n, offset));
    }
    static int fsync(const char *, int, struct fuse_file_info *info)
    {
        if (const int error = suffer(CHANGES, "fsync"))
            return error;
        return result_of(::fsync(static_cast<int>(info->fh)));
    }
    static int opendir(const char *, struct fuse_file_info *)
    {
        return suffer(LOOKS, "opendir");
    }
    static int readdir(const char *path, void *names, fuse_fill_dir_t fill, off_t,
                       struct fuse_file_info *, enum fuse_readdir_flags)
    {
        OddFs::State *s = state();
        if (const int error = suffer(LOOKS, "readdir"))
            return error;
        hang_if_held("readdir", path);
        const int fd = openat(s->backing_fd, below(path), O_RDONLY | O_DIRECTORY);
        DIR *dir = fd < 0 ? nullptr : fdopendir(fd);
        if (dir == nullptr)
            return -errno;
        while (const dirent *entry = ::readdir(dir)) {
            fill(names, entry->d_name, nullptr, 0, static_cast<fuse_fill_dir_flags>(0));
            const std::lock_guard<std::mutex> guard(s->lock);
            if (s->is_serial && entry->d_name[0] != '.')
                s->listed.insert(std::string(path) + "/" + entry->d_name);
        }
        closedir(dir);
        return 0;
    }
    static int fsyncdir(const char *, int, struct fuse_file_info *)
    {
        return suffer(CHANGES, "fsyncdir");
    }
    // Not a call that counts: only questions do.
    static int flush(const char *, struct fuse_file_info *)
    {
        OddFs::State *s = state();
        std::unique_lock<std::mutex> guard(s->lock);
        if (s->mood == Mood::NO_CLOSES) {
            s->n_hanging++;
            s->released_changed.wait(guard, [s] { return s->mood != Mood::NO_CLOSES; });
            s->n_hanging--;
        }
        return 0;
    }
    static int release(const char *, struct fuse_file_info *info)
    {
        const int fd = static_cast<int>(info->fh);
        const std::lock_guard<std::mutex> guard(state()->lock);
        state()->open.erase(fd);
        return result_of(close(fd));
    }
};

OddFs::OddFs(const std::string &backing, const std::string &mount_point, bool is_far,
             bool is_serial, const std::string &type)
    : state_(new State)
{
    state_->is_far = is_far;
    state_->is_serial = is_serial;
    state_->backing_fd = open(backing.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct fuse_operations calls = {};
    calls.init = OddFsCalls::init;
    calls.getattr = OddFsCalls::getattr;
    calls.mkdir = OddFsCalls::mkdir;
    calls.unlink = OddFsCalls::unlink;
    calls.rename = OddFsCalls::rename;
    calls.link = OddFsCalls::link;
    calls.open = OddFsCalls::open;
    calls.create = OddFsCalls::create;
    calls.read = OddFsCalls::read;
    calls.write = OddFsCalls::write;
    calls.flush = OddFsCalls::flush;
    calls.fsync = OddFsCalls::fsync;
    calls.opendir = OddFsCalls::opendir;
    calls.readdir = OddFsCalls::readdir;
    calls.fsyncdir = OddFsCalls::fsyncdir;
    calls.release = OddFsCalls::release;
    char name[] = "odd_fs", option[] = "-oattr_timeout=0,entry_timeout=60",
         cached[] = "-oattr_timeout=60,entry_timeout=60";
    std::string subtype = "-osubtype=" + type;
    char *arguments[] = {name, is_far ? cached : option, subtype.data(), nullptr};
    struct fuse_args args = FUSE_ARGS_INIT(3, arguments);
    state_->fuse = fuse_new(&args, &calls, sizeof calls, state_);
    fuse_opt_free_args(&args);
    if (state_->fuse == nullptr || fuse_mount(state_->fuse, mount_point.c_str()) != 0) {
        why_ = "cannot mount a FUSE file system";
        if (state_->fuse != nullptr)
            fuse_destroy(state_->fuse);
        state_->fuse = nullptr;
        return;
    }
    state_->loop = std::thread([s = state_] {
        struct fuse_loop_config *config = fuse_loop_cfg_create();
        // Hanging ones must not hold up the others.
        fuse_loop_cfg_set_max_threads(config, 2000);
        fuse_loop_mt(s->fuse, config);
        fuse_loop_cfg_destroy(config);
    });
}

OddFs::~OddFs()
{
    release();
    if (state_->fuse != nullptr) {
        fuse_exit(state_->fuse);
        fuse_unmount(state_->fuse); // wakes the loop
        state_->loop.join();
        fuse_destroy(state_->fuse);
    }
    for (const int fd : state_->open) // their release was never asked for
        close(fd);
    close(state_->backing_fd);
    delete state_;
}

void OddFs::release()
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    state_->released = true;
    state_->mood = Mood::GOOD;
    state_->released_changed.notify_all();
}

void OddFs::hold_next(const std::string &call, const std::string &part)
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    state_->held_call = call;
    state_->held_part = part;
}

void OddFs::lose(const std::string &folder)
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    state_->lost.insert(folder);
}

void OddFs::set_mood(Mood mood)
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    state_->mood = mood;
    state_->released_changed.notify_all();
}

void OddFs::answer_what_hangs()
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    state_->n_waves++;
    state_->released_changed.notify_all();
}

int OddFs::n_calls() const
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    return state_->n_calls;
}

std::map<std::string, int> OddFs::calls() const
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    return state_->calls;
}

int OddFs::n_rounds() const
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    return state_->n_rounds;
}

int OddFs::n_hanging() const
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    return state_->n_hanging;
}

int OddFs::n_open() const
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    return static_cast<int>(state_->open.size());
}

int OddFs::n_stats(const std::string &path) const
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    const auto found = state_->n_stats.find(path);
    return found == state_->n_stats.end() ? 0 : found->second;
}

size_t OddFs::n_asked() const
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    return state_->n_asked;
}

int OddFs::n_opens() const
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    return state_->n_opens;
}

size_t OddFs::most_asked() const
{
    const std::lock_guard<std::mutex> guard(state_->lock);
    return state_->most_asked;
}

} // namespace cg_test
