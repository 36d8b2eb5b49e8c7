// Serving a session whose other end is this test, in the kernel's place.
#include "fusefs/fuse_api.h"
#include "fusefs/loop.h"
#include "tests/fusefs/fs_fixture.h"

#include <linux/fuse.h>
#include <sys/socket.h>

namespace
{

// What serving returns where the kernel's first request comes, and then, maybe, the end.
int serve(cg_metrics *metrics, const char *option, bool ends)
{
    int sockets[2];
    struct {
        fuse_in_header header = {};
        fuse_init_in in = {};
    } init;
    struct fuse_args arguments = {};
    const struct fuse_lowlevel_ops ops = {};
    fuse_opt_add_arg(&arguments, "test");
    fuse_opt_add_arg(&arguments, "-o");
    fuse_opt_add_arg(&arguments, option);
    fuse_session *session = fuse_session_new(&arguments, &ops, sizeof ops, nullptr);
    fuse_opt_free_args(&arguments);
    if (session == nullptr || socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0)
        return -1;
    // libfuse closes it.
    EXPECT_EQ(fuse_session_mount(session, ("/dev/fd/" + std::to_string(sockets[0])).c_str()), 0);
    init.header.len = sizeof init;
    init.header.opcode = FUSE_INIT;
    init.header.unique = 1;
    init.in.major = FUSE_KERNEL_VERSION;
    init.in.minor = 31;
    EXPECT_EQ(write(sockets[1], &init, sizeof init), static_cast<ssize_t>(sizeof init));
    if (ends)
        shutdown(sockets[1], SHUT_WR);
    const int error = cg_loop_run(session, metrics, 0);
    EXPECT_TRUE(fuse_session_exited(session));
    fuse_session_destroy(session);
    ::close(sockets[1]);
    return error;
}

TEST(LoopTest, ASessionThatLibfuseRefusesEndsWithAnError)
{
    const cg_test::TempDir dir;
    cg_test::Fs fs(dir.path);
    EXPECT_EQ(serve(cg_fs_metrics(fs.fs), "subtype=test", true), -EIO) << "of the device";
    EXPECT_EQ(serve(cg_fs_metrics(fs.fs), "max_read=131072", false), -EPROTO);
}

} // namespace
