// mail.h - the operator that exchanges rows through mailboxes in memory that ranks share.
#pragma once

#include "hcp/link.h"
#include "shared.h"

namespace hcp {

inline void expect_words(const char *name, const Tensor &words) {
  expect_dtype(name, words, torch::headeronly::ScalarType::Long);
  expect_dim(name, words, 1);
  expect_contiguous(name, words);
  if (!words.is_cpu()) refuse(name, " is not on the cpu, expected it there");
}

// A rank's end of the memory, which counts its messages.
inline hcp_link *link_of(const Tensor &link, const Counts &counts) {
  expect_words("link", link);
  hcp_link *found = static_cast<hcp_link *>(link.mutable_data_ptr());
  hcp_error error;
  expect_ok(hcp_link_check(found, link.size(0), &error), error);
  if (counts.n != hcp_link_counts(found->ranks))
    refuse("counts has ", counts.n, " words, expected the ", hcp_link_counts(found->ranks),
           " of link");
  return found;
}

// The largest dtype of which rows are whole elements. A sum of one part keeps their bits, whatever
// they are.
inline hcp_dtype word_of(const char *name, const hcp_column &rows) {
  int64_t all = static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows.data)) | rows.row_bytes |
                rows.row_stride_bytes;
  if (all % 4 != 0)
    refuse(name, " has rows of ", rows.row_bytes, " bytes, ", rows.row_stride_bytes,
           " bytes apart, expected all of them to begin at a multiple of 4");
  return all % 8 == 0 ? HCP_FLOAT64 : HCP_FLOAT32;
}

// The messages of an exchange, checked as a whole.
class Mail {
 public:
  Mail(const Tensor &source, const Tensor &target, const Tensor &rounds, hcp_link *own)
      : link_(own), sent_(column_of("sent", source)), received_(output_of("received", target)) {
    expect_same_device("received", target, "sent", source);
    expect_contiguous("received", target);
    expect_words("rounds", rounds);
    received_.row_stride_bytes = received_.row_bytes;
    if (source.size(0) < 2) sent_.row_stride_bytes = sent_.row_bytes;
    hcp_error error;
    expect_ok(hcp_link_read_rounds(
                  link_, static_cast<const int64_t *>(rounds.const_data_ptr()), rounds.size(0),
                  {sent_.row_bytes, received_.row_bytes, target.size(0)}, &all_, &error),
              error);
    expect_runs(source.size(0));
    if (all_.count[HCP_MAILBOX_WRITES] > 0) sent_word_ = word_of("sent", sent_);
    if (all_.count[HCP_MAILBOX_READS] > 0) received_word_ = word_of("received", received_);
  }

  template <class Device>
  void queue(const Device &device, const Exchange &exchange, const Tensor &like,
             uint32_t *stage_progress, uint32_t *read_progress) const {
    int64_t write = 0, read = 0;
    for (int64_t round = 0; round < all_.count[HCP_MAILBOX_ROUNDS]; ++round) {
      for (; write < all_.rounds[round].writes_end; ++write)
        queue_write(write, device, exchange, like, stage_progress);
      for (; read < all_.rounds[round].reads_end; ++read)
        queue_read(read, device, exchange, like, read_progress);
    }
  }

 private:
  template <class Device>
  void queue_write(int64_t i, const Device &device, const Exchange &exchange, const Tensor &like,
                   uint32_t *progress) const {
    Runs runs = write_runs(i);
    hcp_message message = hcp_link_next_sent(link_, all_.writes[i].reader);
    hcp_sum sum = {sent_word_, &sent_, 1, runs.data, runs.n, all_.writes[i].rows};
    hcp_column mailbox = {message.rows, sent_.row_bytes, sent_.row_bytes};
    device.stage(&sum, mailbox, exchange.awaited({&message.awaited, 1}, HCP_READ_TAG, like),
                 counted({&message.told, 1}, exchange.counts, exchange.tag), progress);
  }

  template <class Device>
  void queue_read(int64_t i, const Device &device, const Exchange &exchange, const Tensor &like,
                  uint32_t *progress) const {
    std::vector<hcp_column> mailboxes;
    std::vector<hcp_signal> awaited, told;
    Sizes rows = owner_rows(i);
    int32_t before = 0; /* owners that are ranks before this one */
    for (int64_t o = owners_begin(i); o < all_.reads[i].owners_end; ++o) {
      const hcp_mail_owner &owner = all_.owners[o];
      hcp_message message = hcp_link_next_received(link_, owner.peer, owner.met != 0);
      mailboxes.push_back({message.rows, received_.row_bytes, received_.row_bytes});
      awaited.push_back(message.awaited);
      if (owner.done) told.push_back(message.told);
      before += owner.peer < link_->rank;
    }
    hcp_column out = received_;
    out.data = static_cast<char *>(out.data) + all_.reads[i].first_row * out.row_bytes;
    Runs runs = read_runs(i);
    hcp_sum sum = {received_word_, mailboxes.data(), 1, runs.data, runs.n, all_.reads[i].rows};
    Signals owners = {awaited.data(), static_cast<int64_t>(awaited.size())};
    Signals done = {told.data(), static_cast<int64_t>(told.size())};
    hcp_staged staged = {exchange.awaited(owners, exchange.tag, like), before, 0, rows.data(),
                         false};
    device.read(&sum, out, &staged, counted(done, exchange.counts, HCP_READ_TAG), progress);
  }

  Runs write_runs(int64_t i) const {
    int64_t begin = i > 0 ? all_.writes[i - 1].runs_end : 0;
    return {all_.write_runs + begin, all_.writes[i].runs_end - begin};
  }

  Runs read_runs(int64_t i) const {
    int64_t begin = i > 0 ? all_.reads[i - 1].runs_end : 0;
    return {all_.read_runs + begin, all_.reads[i].runs_end - begin};
  }

  int64_t owners_begin(int64_t i) const { return i > 0 ? all_.reads[i - 1].owners_end : 0; }

  Sizes owner_rows(int64_t i) const {
    Sizes rows;
    for (int64_t o = owners_begin(i); o < all_.reads[i].owners_end; ++o)
      rows.push_back(all_.owners[o].rows);
    return rows;
  }

  void expect_runs(int64_t sent_rows) const {
    hcp_error error;
    for (int64_t i = 0; i < all_.count[HCP_MAILBOX_WRITES]; ++i) {
      Runs runs = write_runs(i);
      expect_ok(hcp_check_runs(runs.data, runs.n, &sent_rows, 1, all_.writes[i].rows, &error),
                error);
    }
    for (int64_t i = 0; i < all_.count[HCP_MAILBOX_READS]; ++i) {
      Runs runs = read_runs(i);
      Sizes rows = owner_rows(i);
      expect_ok(hcp_check_runs(runs.data, runs.n, rows.data(), static_cast<int64_t>(rows.size()),
                               all_.reads[i].rows, &error),
                error);
    }
  }

  hcp_link *link_;
  hcp_column sent_, received_;
  hcp_dtype sent_word_ = HCP_FLOAT32, received_word_ = HCP_FLOAT32;
  hcp_mail all_;
};

// On a stream that follows the current one.
template <class Device>
void mail(Tensor sent, Tensor received, Tensor rounds, Tensor link, Tensor stage_progress,
          Tensor read_progress, Tensor counts, int64_t tag, int64_t timeout_ns, Tensor failure,
          int64_t stream) {
  if (!sent.defined()) refuse("sent is None, expected a tensor");
  Exchange exchange(counts, stage_progress, tag, timeout_ns, failure);
  uint32_t *staging = progress_of(stage_progress, sent),
           *reading = progress_of(read_progress, sent);
  Mail messages(sent, received, rounds, link_of(link, exchange.counts));
  messages.queue(Device(sent, stream), exchange, sent, staging, reading);
}

template <class Device>
void implement_mail(torch::stable::detail::StableLibrary &m) {
  m.impl("mail", TORCH_BOX(&mail<Device>));
}

}  // namespace hcp
