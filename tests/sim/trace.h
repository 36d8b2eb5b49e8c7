// tests/sim/trace.h - the bandwidth of a link over time: a trace that was measured, or one made up.
#ifndef CG_TESTS_SIM_TRACE_H
#define CG_TESTS_SIM_TRACE_H
#include <string>
#include <vector>

namespace cg_sim
{

// A rate holds from its time until the next one's; after the end the trace begins anew. Seconds,
// bits a second, bits.
class Trace
{
  public:
    Trace(std::string name, std::vector<double> times_s, std::vector<double> bps, double scale);
    // A file as in shared/data/bandwidth: time_s,bandwidth_mbps. Throws std::runtime_error.
    static Trace read(const std::string &path, double scale);

    double bits_between(double from_s, double to_s) const
    {
        return bits_until(to_s) - bits_until(from_s);
    }
    // When so many bits have come that are asked for from from_s on.
    double time_of(double from_s, double bits) const;
    double length_s() const
    {
        return times_.back();
    }
    double mean_bps() const
    {
        return bits_.back() / times_.back();
    }
    const std::string name;

  private:
    double bits_until(double s) const;
    std::vector<double> times_; // [n + 1], the last one the end
    std::vector<double> bps_;   // [n]
    std::vector<double> bits_;  // [n + 1] since the start
};

} // namespace cg_sim
#endif
