// Traces of loads: what is in them, and that they cost a load nothing.
#include "connector/trace.h"
#include "tests/connector/engine.h"
#include "tests/connector/watch.h"

#include <jansson.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>

namespace
{

using namespace cg_test;

// Nothing is late, however busy the machine is: closing waits for the traces.
const std::string PATIENT = "\"close_timeout_ms\": 600000, \"ttft_budget_ms\": 600000, "
                            "\"lookup_timeout_ms\": 600000, \"read_timeout_ms\": 600000, "
                            "\"save_timeout_ms\": 600000";

std::string traced(const std::string &directory)
{
    return PATIENT + ", \"trace_dir\": \"" + directory + "\"";
}

struct Event {
    std::string name, phase, status, request;
    int64_t row = 0;
    double ts = 0, end = 0;
    std::map<std::string, double> args;
};

// What Chrome's trace event format asks of an event, and nothing that it does not know.
void check_event(const json_t *json)
{
    const auto has_text = [](const json_t *object, const char *key) {
        return json_string_length(json_object_get(object, key)) > 0;
    };
    const json_t *args = json_object_get(json, "args");
    ASSERT_TRUE(json_is_object(json));
    ASSERT_TRUE(has_text(json, "name"));
    ASSERT_TRUE(has_text(json, "ph"));
    ASSERT_TRUE(json_is_integer(json_object_get(json, "pid")));
    ASSERT_TRUE(json_is_integer(json_object_get(json, "tid")));
    ASSERT_TRUE(json_is_object(args));
    const std::string phase = json_string_value(json_object_get(json, "ph"));
    std::set<std::string> keys = {"name", "ph", "pid", "tid", "args"};
    if (phase != "M") {
        keys.insert("ts");
        EXPECT_TRUE(json_is_number(json_object_get(json, "ts")));
        EXPECT_GE(json_number_value(json_object_get(json, "ts")), 0);
    }
    const char *key;
    json_t *value;
    if (phase == "X") {
        keys.insert("dur");
        EXPECT_TRUE(json_is_number(json_object_get(json, "dur")));
        EXPECT_GE(json_number_value(json_object_get(json, "dur")), 0);
    } else if (phase == "i") {
        keys.insert("s"); // how far its line reaches: a thread's row
        EXPECT_STREQ(json_string_value(json_object_get(json, "s")), "t");
    } else if (phase == "C") {
        EXPECT_GT(json_object_size(args), 0u);
        json_object_foreach(const_cast<json_t *>(args), key, value)
        {
            EXPECT_TRUE(json_is_number(value)) << key;
        }
    } else {
        EXPECT_EQ(phase, "M");
        EXPECT_STREQ(json_string_value(json_object_get(json, "name")), "process_name");
        EXPECT_TRUE(has_text(args, "name"));
    }
    json_object_foreach(const_cast<json_t *>(json), key, value)
    {
        EXPECT_TRUE(keys.count(key)) << key << " of a \"" << phase << '"';
    }
}

struct Trace {
    bool is_json = false;
    double dropped_events = -1;
    std::vector<Event> events;

    explicit Trace(const std::string &text)
    {
        const std::unique_ptr<json_t, void (*)(json_t *)> root(
            json_loadb(text.data(), text.size(), JSON_REJECT_DUPLICATES, nullptr), json_decref);
        is_json = root != nullptr;
        dropped_events = json_number_value(
            json_object_get(json_object_get(root.get(), "otherData"), "dropped_events"));
        EXPECT_STREQ(json_string_value(json_object_get(root.get(), "displayTimeUnit")), "ms");
        const json_t *all = json_object_get(root.get(), "traceEvents");
        EXPECT_TRUE(json_is_array(all));
        for (size_t i = 0; i < json_array_size(all); i++)
            add(json_array_get(all, i));
        check_rows();
    }
    std::vector<Event> named(const std::string &name) const
    {
        std::vector<Event> found;
        for (const Event &event : events)
            if (event.name == name)
                found.push_back(event);
        return found;
    }

  private:
    // What a row shows follows or lies within each other: viewers draw it as calls.
    void check_rows() const
    {
        std::map<int64_t, std::vector<std::pair<int64_t, int64_t>>> rows; // begin, minus the end
        const auto ns = [](double us) { return llround(us * 1000); };
        for (const Event &event : events)
            if (event.phase == "X")
                rows[event.row].emplace_back(ns(event.ts), -ns(event.end));
        for (auto &row : rows) {
            std::sort(row.second.begin(), row.second.end());
            std::vector<int64_t> open; // ends
            for (const auto &[begin, minus_end] : row.second) {
                while (!open.empty() && open.back() <= begin)
                    open.pop_back();
                EXPECT_TRUE(open.empty() || -minus_end <= open.back())
                    << "two overlap in row " << row.first;
                open.push_back(-minus_end);
            }
        }
    }
    void add(json_t *json)
    {
        check_event(json);
        Event event;
        event.row = json_integer_value(json_object_get(json, "tid"));
        event.name = json_string_value(json_object_get(json, "name"));
        event.phase = json_string_value(json_object_get(json, "ph"));
        event.ts = json_number_value(json_object_get(json, "ts"));
        event.end = event.ts + json_number_value(json_object_get(json, "dur"));
        const char *key;
        json_t *value;
        json_object_foreach(json_object_get(json, "args"), key, value)
        {
            if (std::string(key) == "status")
                event.status = json_string_value(value);
            if (std::string(key) == "request")
                event.request = json_string_value(value);
            event.args[key] = json_number_value(value);
        }
        events.push_back(event);
    }
};

// Levels that nest, so that there is something to plan; and a prompt of six chunks.
struct Traced {
    Store store{true};
    TempDir dir;
    const Tokens tokens = prompt(32 * 6 + 1);
    Traced()
    {
        Engine cold(store, PATIENT);
        EXPECT_EQ(cold.save(tokens), CACHEGEN_OK);
    }
    Trace only_trace() const
    {
        const std::vector<std::string> files = dir.files();
        EXPECT_EQ(files.size(), 1u);
        return Trace(files.empty() ? "" : dir.read_text(files[0]));
    }
};

TEST(TraceTest, ALoadLeavesWhatItRead)
{
    const Traced t;
    Load l;
    {
        Engine warm(t.store, traced(t.dir.path));
        ASSERT_EQ(warm.open_status, CACHEGEN_OK) << warm.error;
        l = warm.load(t.tokens);
        ASSERT_EQ(l.status, CACHEGEN_OK);
        EXPECT_LT(warm.error_of(t.tokens, 0, 192), 10);
    }
    const Trace trace = t.only_trace();
    ASSERT_TRUE(trace.is_json);
    EXPECT_EQ(trace.dropped_events, 0);

    const std::vector<Event> loads = trace.named("load"), reads = trace.named("read");
    ASSERT_EQ(loads.size(), 1u);
    EXPECT_EQ(loads[0].status, "ok");
    EXPECT_EQ(loads[0].args.at("loaded_tokens"), 192);
    EXPECT_EQ(loads[0].args.at("bytes_read"), l.progress.bytes_read);
    double bytes = 0;
    for (const Event &read : reads) {
        EXPECT_EQ(read.status, "ok");
        EXPECT_EQ(read.args.at("bytes"), read.args.at("asked_bytes"));
        bytes += read.args.at("bytes");
    }
    EXPECT_EQ(bytes, l.progress.bytes_read);
    EXPECT_GE(reads.size(), 6u);
}

// Clients may choose a part of it.
TEST(TraceTest, ItNamesTheRequestWhateverIsInItsName)
{
    const std::string longest(CG_TRACE_ID_BYTES, 'x'), shorter = longest.substr(2);
    const std::string odd = "cmpl-\"},\n{\\\x01 \x7f \xc3\xa9 \xf0\x9f\x98\x80";
    const std::pair<std::string, std::string> ids[] = {{"", ""},
                                                       {"cmpl-7", "cmpl-7"},
                                                       {odd, odd},
                                                       {"no UTF-8 \xff", ""},
                                                       {longest, longest},
                                                       {longest + "y", longest},
                                                       {shorter + "\xc3\xa9", shorter + "\xc3\xa9"},
                                                       {shorter + "x\xc3\xa9", shorter + "x"},
                                                       {shorter + "\xf0\x9f\x98\x80", shorter}};
    for (const auto &[given, told] : ids) {
        SCOPED_TRACE(given);
        const Traced t;
        {
            Engine warm(t.store, traced(t.dir.path));
            warm.request_id = given.empty() ? nullptr : given.c_str();
            ASSERT_EQ(warm.load(t.tokens).status, CACHEGEN_OK);
        }
        const Trace trace = t.only_trace();
        ASSERT_TRUE(trace.is_json);
        ASSERT_EQ(trace.named("load").size(), 1u);
        EXPECT_EQ(trace.named("load")[0].request, told);
    }
}

TEST(TraceTest, ItsTimesAreInOrder)
{
    const Traced t;
    ASSERT_EQ(Engine(t.store, traced(t.dir.path)).load(t.tokens).status, CACHEGEN_OK);
    const Trace trace = t.only_trace();
    const std::vector<Event> loads = trace.named("load"), decodes = trace.named("decode");
    ASSERT_EQ(loads.size(), 1u);
    const double rounding = 0.01; // of sums in microseconds
    std::map<double, double> first_read;
    std::string last;
    double last_ts = 0;
    for (const Event &event : trace.events) {
        if (event.phase != "X" && event.phase != "i")
            continue;
        EXPECT_GE(event.ts, loads[0].ts - rounding) << event.name;
        EXPECT_LE(event.end, loads[0].end + rounding) << event.name;
        EXPECT_GE(event.ts, last_ts - rounding) << event.name << " after " << last;
        last = event.name;
        last_ts = event.ts;
        if (event.name == "read")
            first_read.emplace(event.args.at("chunk"), event.end);
    }
    EXPECT_EQ(decodes.size(), 6u);
    for (const Event &decode : decodes) {
        EXPECT_EQ(decode.status, "ok");
        ASSERT_TRUE(first_read.count(decode.args.at("chunk")));
        EXPECT_GE(decode.ts, first_read[decode.args.at("chunk")] - rounding);
        EXPECT_EQ(decode.args.count("thread_us"), 1u);
    }
    const std::vector<Event> plans = trace.named("plan");
    ASSERT_FALSE(plans.empty());
    EXPECT_LE(plans[0].ts, first_read.begin()->second);
    for (const Event &plan : plans)
        EXPECT_EQ(plan.args.at("L0") + plan.args.at("L1") + plan.args.at("L2") + plan.args.at("L3"),
                  6);
}

// What plans go by: a chunk is delivered when it is in its blocks.
TEST(TraceTest, WritingToBlocksCountsInTheTimeOfAChunk)
{
    const Traced t;
    const Load l = Engine(t.store, traced(t.dir.path)).load(t.tokens);
    ASSERT_EQ(l.status, CACHEGEN_OK);
    double thread_us = 0;
    for (const Event &decode : t.only_trace().named("decode"))
        thread_us += decode.args.at("thread_us");
    EXPECT_GT(l.progress.copy_ns, 0u);
    EXPECT_NEAR(thread_us, static_cast<double>(l.progress.decode_ns + l.progress.copy_ns) / 1e3,
                0.01);
}

TEST(TraceTest, AFailedLoadSaysWhatFailed)
{
    const Traced t;
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    {
        Engine warm(t.store, traced(t.dir.path));
        cachegen_load *load;
        ASSERT_EQ(warm.look_up(t.tokens).hit_tokens, 192u);
        for (const std::string &path : t.store.dir.files("m/objects"))
            std::filesystem::resize_file(t.store.dir.path + "/" + path, 0);
        ASSERT_EQ(warm.load_start(0, 192, &load), CACHEGEN_OK);
        EXPECT_EQ(wait_for(warm.c, [&] { return cachegen_load_poll(load, &p); }), CACHEGEN_OK);
        cachegen_load_free(load);
        EXPECT_NE(p.status, CACHEGEN_OK);
    }
    const std::string why = cachegen_strerror(p.status);
    const Trace trace = t.only_trace();
    ASSERT_TRUE(trace.is_json);
    ASSERT_EQ(trace.named("load").size(), 1u);
    EXPECT_EQ(trace.named("load")[0].status, why);
    ASSERT_FALSE(trace.named("read").empty());
    for (const Event &read : trace.named("read")) {
        EXPECT_NE(read.status, "ok");
        EXPECT_EQ(read.args.at("bytes"), 0);
    }
    ASSERT_FALSE(trace.named("cut").empty());
    EXPECT_EQ(trace.named("cut").back().status, why);
    EXPECT_TRUE(trace.named("decode").empty());
}

TEST(TraceTest, FilesAreWholeOfTheirOwnAndTheirOwnersAlone)
{
    const Traced t;
    {
        Engine warm(t.store, traced(t.dir.path));
        for (int i = 0; i < 3; i++)
            ASSERT_EQ(warm.load(t.tokens).status, CACHEGEN_OK);
    }
    const std::vector<std::string> files = t.dir.files();
    EXPECT_EQ(files.size(), 3u);
    for (const std::string &name : files) {
        struct stat st = {};
        ASSERT_EQ(stat((t.dir.path + "/" + name).c_str(), &st), 0);
        EXPECT_EQ(st.st_mode & 07777, 0600u);
        EXPECT_EQ(name.substr(name.size() - 5), ".json") << "nothing half written is left";
        EXPECT_TRUE(Trace(t.dir.read_text(name)).is_json);
    }
}

TEST(TraceTest, ADirectoryThatCannotBeWrittenCostsOnlyTraces)
{
    const Traced t;
    t.dir.write("file", std::string("x"));
    testing::internal::CaptureStderr();
    {
        Engine warm(t.store, traced(t.dir.path + "/file"));
        for (int i = 0; i < 2; i++) {
            EXPECT_EQ(warm.load(t.tokens).status, CACHEGEN_OK);
            EXPECT_LT(warm.error_of(t.tokens, 0, 192), 10);
        }
    }
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("cachegen: trace_dir " + t.dir.path + "/file: "), 0u) << said;
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_EQ(t.dir.files().size(), 1u);
}

TEST(TraceTest, OffThereIsNeitherThreadNorFile)
{
    const Traced t;
    Engine on(t.store, traced(t.dir.path));
    ASSERT_EQ(on.load(t.tokens).status, CACHEGEN_OK);
    const auto has_thread = [] {
        return our_threads().find("cachegen-trace") != std::string::npos;
    };
    EXPECT_TRUE(has_thread());
    cachegen_close(on.c);
    on.c = nullptr;
    const size_t n_files = t.dir.files().size();

    Engine off(t.store, PATIENT);
    ASSERT_EQ(off.load(t.tokens).status, CACHEGEN_OK);
    EXPECT_TRUE(comes_true([&] { return !has_thread(); })); // the first one's may still be ending
    EXPECT_EQ(cg_trace_new(off.c, 0, nullptr), nullptr);
    EXPECT_EQ(t.dir.files().size(), n_files);
}

TEST(TraceTest, WhatIsTooMuchIsCounted)
{
    const Traced t;
    const TempDir other;
    Engine engine(t.store, traced(t.dir.path));
    const std::unique_ptr<cg_trace, void (*)(cg_trace *)> trace(cg_trace_new(engine.c, 0, nullptr),
                                                                cg_trace_free);
    ASSERT_NE(trace, nullptr);
    cg_trace_event event = {};
    event.began_ns = 5000;
    event.ended_ns = 4000; // a clock that went back would be a length that is none
    event.estimated_bps = event.actual_bps = INFINITY;
    event.asked_bytes = INT64_MAX;
    for (int i = 0; i < CG_TRACE_MAX_EVENTS + 7; i++)
        cg_trace_add(trace.get(), &event);
    ASSERT_EQ(cg_trace_write(trace.get(), other.path.c_str()), CG_OK);
    EXPECT_EQ(cg_trace_write(trace.get(), (other.path + "/none").c_str()), CG_ERR_NOT_FOUND);
    ASSERT_EQ(other.files().size(), 1u);
    const Trace read(other.read_text(other.files()[0]));
    ASSERT_TRUE(read.is_json);
    EXPECT_EQ(read.dropped_events, 7);
    const std::vector<Event> reads = read.named("read");
    ASSERT_EQ(reads.size(), size_t{CG_TRACE_MAX_EVENTS});
    EXPECT_EQ(reads[0].ts, 5);
    EXPECT_EQ(reads[0].end, 5);
}

TEST(TraceTest, AConnectorLeavesAThousandFiles)
{
    const Store store;
    const TempDir dir;
    const Tokens tokens = prompt(9);
    testing::internal::CaptureStderr();
    {
        Engine engine(store, traced(dir.path) + ", \"chunk_tokens\": 8");
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        ASSERT_EQ(engine.look_up(tokens).hit_tokens, 8u);
        for (int i = 0; i < CG_TRACE_MAX_FILES + 50; i++) {
            cachegen_load *load;
            ASSERT_EQ(engine.load_start(0, 8, &load), CACHEGEN_OK);
            cachegen_load_free(load);
            const size_t n_files = std::min(i + 1, int{CG_TRACE_MAX_FILES});
            if (i % 32 == 0) // lets the writer keep up
                comes_true([&] { return n_entries(dir.path.c_str()) >= n_files; });
        }
    }
    const std::string said = testing::internal::GetCapturedStderr();
    // Fewer where the disk is so slow that traces are lost.
    EXPECT_LE(dir.files().size(), size_t{CG_TRACE_MAX_FILES});
    EXPECT_GE(dir.files().size(), size_t{CG_TRACE_MAX_WAITING});
    EXPECT_LE(std::count(said.begin(), said.end(), '\n'), 2) << said;
}

} // namespace
