// What the sanitizers find inside libfuse, whose code is not ours, is not a finding about cachegenfs.
extern "C" {
const char *__lsan_default_suppressions();
const char *__tsan_default_suppressions();

const char *__lsan_default_suppressions() { return "leak:libfuse3\n"; }
const char *__tsan_default_suppressions() { return "race:libfuse3\n"; }
}
