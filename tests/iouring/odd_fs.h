// tests/iouring/odd_fs.h - a FUSE file system over a directory that misbehaves by name.
//
// "hang_stat", "hang_open", "hang_read", "hang_write" in a name: answered only after release().
// "short": a read gives at most 1000 bytes.
// "nodirect": opening with O_DIRECT is EINVAL; "latedirect": reading is.
// "timeless": has no times, and as a folder no size, as over some object stores. Hard links are
// refused (EPERM), as on vfat or some network file systems, except to names with "links" in them; a
// file with "full" in its name has all the links that it can have (EMLINK). A far one has links.
// "views": no file is renamed to a name of L2 or L3 (EXDEV), as on a cachegenfs mount; with "sshfs"
// that is EPERM.
//
// Besides, the whole of it has a mood, which can change at any time.
#ifndef CG_TESTS_IOURING_ODD_FS_H
#define CG_TESTS_IOURING_ODD_FS_H
#include <cstddef>
#include <map>
#include <string>

namespace cg_test
{

enum class Mood {
    GOOD,
    HANGING,   // until the mood changes
    TRICKLING, // reads are not answered until the mood changes, all else is
    NO_CLOSES, // closing a file is not answered until the mood changes, all else is
    SLOW,      // some milliseconds a call
    IN_ROUNDS, // calls are held until no more come, then all go on at once: a round trip
    FULL,      // what makes something new is ENOSPC
    READ_ONLY, // what changes something is EROFS
    GONE,      // everything is EIO
    CUT,       // of a file no more than 100 bytes can be read, without an error
};

class OddFs
{
  public:
    // Mounts backing at mount_point. why() is not empty when that failed. is_far: as a
    // good network file system, the kernel keeps what it was told of a file for a minute (else only
    // names), and has many questions under way. is_serial: as in sshfs, only one name of a folder
    // is looked up at a time, and names that were listed are known from then on: no call of theirs
    // counts or suffers. type: the mount's is "fuse.TYPE".
    OddFs(const std::string &backing, const std::string &mount_point, bool is_far = false,
          bool is_serial = false, const std::string &type = "odd");
    ~OddFs(); // releases, unmounts
    OddFs(const OddFs &) = delete;
    OddFs &operator=(const OddFs &) = delete;

    // The next call of this kind about a path with this in it hangs until release(): "name" (a
    // link or rename to it), "readdir", "write".
    void hold_next(const std::string &call, const std::string &part);
    void release(); // all that hangs, and what would hang from now on
    void set_mood(Mood mood);
    void answer_what_hangs(); // for its mood; what comes later hangs as before
    int n_hanging() const;
    int n_calls() const;                      // of all kinds
    std::map<std::string, int> calls() const; // "mkdir", "getattr" (look-ups, too)
    int n_rounds() const;                     // until now, in that mood
    int n_open() const;        // files; their release follows their close some time later
    size_t most_asked() const; // bytes that a read wanted
    size_t n_asked() const;    // bytes that all reads wanted
    int n_opens() const;       // of files
    // How often the status of this path below the mount was asked for.
    int n_stats(const std::string &path) const;
    // What lies below this folder is ESTALE from now on, as on NFS where it was removed and made
    // anew by others, until the kernel looks up the folder's name. "m/objects/ab"
    void lose(const std::string &folder);
    const std::string &why() const
    {
        return why_;
    }

    struct State; // odd_fs.cc

  private:
    State *state_;
    std::string why_;
};

} // namespace cg_test
#endif
