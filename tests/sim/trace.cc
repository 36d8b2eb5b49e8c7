#include "tests/sim/trace.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <stdexcept>

namespace cg_sim
{

// A link without a bit for ever would hold the simulator's clock.
static const double LEAST_BPS = 1;

Trace::Trace(std::string trace_name, std::vector<double> times_s, std::vector<double> bps,
             double scale)
    : name(std::move(trace_name)), times_(std::move(times_s)), bps_(std::move(bps)), bits_{0}
{
    const size_t n = bps_.size();
    times_.resize(n);
    // The last rate holds as long as the one before it did.
    times_.push_back(n > 1 ? 2 * times_[n - 1] - times_[n - 2] : times_[0] + 1);
    for (size_t i = 0; i < n; i++) {
        bps_[i] = std::max(bps_[i] * scale, LEAST_BPS);
        bits_.push_back(bits_[i] + bps_[i] * (times_[i + 1] - times_[i]));
    }
}

Trace Trace::read(const std::string &path, double scale)
{
    std::ifstream in(path);
    std::string line;
    std::vector<double> times_s, bps;
    std::getline(in, line); // the names of the columns
    while (std::getline(in, line)) {
        size_t comma = line.find(',');
        if (comma == std::string::npos)
            throw std::runtime_error(path + ": no comma in: " + line);
        times_s.push_back(std::stod(line.substr(0, comma)));
        bps.push_back(std::stod(line.substr(comma + 1)) * 1e6);
    }
    if (bps.size() < 2)
        throw std::runtime_error(path + ": no trace");
    const size_t slash = path.rfind('/') + 1, dot = path.rfind('.');
    return Trace(path.substr(slash, dot - slash), times_s, bps, scale);
}

double Trace::bits_until(double s) const
{
    const double rounds = std::floor(s / times_.back()), at = s - rounds * times_.back();
    const size_t i = static_cast<size_t>(
        std::upper_bound(times_.begin() + 1, times_.end() - 1, at) - times_.begin() - 1);
    return rounds * bits_.back() + bits_[i] + (at - times_[i]) * bps_[i];
}

double Trace::time_of(double from_s, double bits) const
{
    const double target = bits_until(from_s) + bits, rounds = std::floor(target / bits_.back());
    const double rest = target - rounds * bits_.back();
    const size_t i = static_cast<size_t>(
        std::upper_bound(bits_.begin() + 1, bits_.end() - 1, rest) - bits_.begin() - 1);
    return std::max(from_s, rounds * times_.back() + times_[i] + (rest - bits_[i]) / bps_[i]);
}

} // namespace cg_sim
