// What the sanitizers find inside libfuse, whose code is not ours, is not a finding about
// cachegenfs. By the library's name where it is shared, by its functions' where it is static.
extern "C" {
const char *__lsan_default_suppressions();
const char *__tsan_default_suppressions();

const char *__lsan_default_suppressions()
{
    return "leak:libfuse3\nleak:fuse_lib_\n";
}
const char *__tsan_default_suppressions()
{
    return "race:libfuse3\nrace:^fuse_lib_\nrace:^fuse_kern_unmount\n";
}
}
