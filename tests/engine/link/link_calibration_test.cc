#include "pinion/engine/link/link_calibration.h"

#include <limits>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(LinkCalibrationFieldsTest, AFieldThatIsNoCostOrBandwidthIsRefusedByName) {
  const struct {
    const char* name;
    double& (*field)(LinkCalibration&);
    bool may_be_zero;
    bool is_rate;
  } fields[] = {
#define PINION_FIELD(field, may_be_zero, is_rate) \
  {#field, [](LinkCalibration& link) -> double& { return link.field; }, may_be_zero, is_rate}
      PINION_FIELD(h2d.fixed_us, true, false),       PINION_FIELD(h2d.piece_us, true, false),
      PINION_FIELD(h2d.gb_per_s, false, true),       PINION_FIELD(d2h.fixed_us, true, false),
      PINION_FIELD(d2h.piece_us, true, false),       PINION_FIELD(d2h.gb_per_s, false, true),
      PINION_FIELD(h2d_duplex_gb_per_s, true, true), PINION_FIELD(d2h_duplex_gb_per_s, true, true),
#undef PINION_FIELD
  };
  const double infinity = std::numeric_limits<double>::infinity();
  for (const auto& [name, field, may_be_zero, is_rate] : fields) {
    SCOPED_TRACE(name);
    LinkCalibration link = AssumedLink();
    for (const double value : {-1.0, infinity, std::numeric_limits<double>::quiet_NaN()}) {
      field(link) = value;
      EXPECT_THAT(link.Validate(),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           AllOf(HasSubstr("the link's " + std::string(name) + " is "),
                                 HasSubstr("finite"), HasSubstr("AssumedLink()"))));
      if (is_rate) {
        EXPECT_THAT(RatesOf(link), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(name)));
      }
    }
    field(link) = 0;
    EXPECT_EQ(link.Validate().ok(), may_be_zero);
  }
  EXPECT_THAT(AssumedLink().Validate(), IsOk());
}

// --- LinkUs: 10,000 bytes in each direction ---

double TenKbEachWayUs(const LinkRates& rates) { return LinkUs(10e3, 10e3, rates); }

TEST(LinkUsTest, BothDirectionsAtOnceGoAtTheDuplexRates) {
  EXPECT_DOUBLE_EQ(TenKbEachWayUs({.out = 5e3, .in = 5e3, .duplex_out = 5e3, .duplex_in = 5e3}), 2);
  EXPECT_DOUBLE_EQ(TenKbEachWayUs({.out = 5e3, .in = 5e3, .duplex_out = 4e3, .duplex_in = 4e3}),
                   2.5);
}

TEST(LinkUsTest, TheSlowerDirectionGoesOnAlone) {
  // In 2 us all comes in and 4 KB go out. The other 6 KB take 2 us more.
  EXPECT_DOUBLE_EQ(TenKbEachWayUs({.out = 3e3, .in = 6e3, .duplex_out = 2e3, .duplex_in = 5e3}), 4);
}

TEST(LinkUsTest, DirectionsThatHinderEachOtherGoOneAfterTheOther) {
  EXPECT_DOUBLE_EQ(TenKbEachWayUs({.out = 5e3, .in = 5e3, .duplex_out = 1e3, .duplex_in = 1e3}), 4);
}

TEST(LinkUsDeathTest, BytesOrARateThatThereCannotBeAreNamed) {
  const LinkRates rates = RatesOf(AssumedLink()).value();
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double bad : {-1.0, infinity, nan}) {
    EXPECT_DEATH(LinkUs(bad, 8, rates), " and 8 bytes; both must be finite and at least 0");
    EXPECT_DEATH(LinkUs(8, bad, rates), "LinkUs of 8 and .* both must be finite and at least 0");
  }
  for (double LinkRates::*rate :
       {&LinkRates::out, &LinkRates::in, &LinkRates::duplex_out, &LinkRates::duplex_in}) {
    for (const double bad : {0.0, -1.0, infinity, nan}) {
      LinkRates wrong = rates;
      wrong.*rate = bad;
      EXPECT_DEATH(LinkUs(8, 8, wrong), "bytes per us; take the rates from RatesOf");
    }
  }
}

}  // namespace
}  // namespace pinion::testing
