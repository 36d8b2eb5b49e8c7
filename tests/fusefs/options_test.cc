// The command line of a mount: what libfuse is told of it.
#include "fusefs/options.h"
#include "tests/iouring/temp_dir.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

namespace
{

// The options that libfuse gets of a mount with these, in order.
std::vector<std::string> told(const std::string &options)
{
    const cg_test::TempDir dir;
    std::filesystem::create_directory(dir.path + "/store");
    std::filesystem::create_directory(dir.path + "/mnt");
    std::vector<std::string> words = {"cachegenfs", dir.path + "/store", dir.path + "/mnt", "-o",
                                      options};
    std::vector<char *> argv;
    for (std::string &word : words)
        argv.push_back(word.data());
    argv.push_back(nullptr);
    cg_options parsed;
    if (cg_options_parse(static_cast<int>(words.size()), argv.data(), &parsed) != CG_OPTIONS_RUN)
        return {"refused"};
    std::vector<std::string> all;
    for (int i = 1; i < parsed.fuse.argc; i++) {
        std::istringstream argument(parsed.fuse.argv[i]);
        for (std::string option; std::getline(argument, option, ',');)
            all.push_back(option);
    }
    cg_options_destroy(&parsed);
    return all;
}

TEST(OptionsTest, AMountIsNosuidAndNodevWhateverIsAsked)
{
    // The first is what mount.fuse3 gives when root mounts.
    for (const char *options :
         {"rw,dev,suid", "nosuid,nodev", "suid,nosuid,dev,nodev", "noatime"}) {
        const std::vector<std::string> all = told(options);
        for (const char *wanted : {"nosuid", "nodev"})
            EXPECT_NE(std::count(all.begin(), all.end(), wanted), 0) << wanted << " of " << options;
        for (const char *unwanted : {"suid", "dev", "refused"})
            EXPECT_EQ(std::count(all.begin(), all.end(), unwanted), 0)
                << unwanted << " of " << options;
    }
}

} // namespace
