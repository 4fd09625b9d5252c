/* Latency for what arrives in network namespaces: delayline QUEUE DELAY_US NAMESPACE_FILE...
 *
 * Packets that a firewall rule there sends to netfilter's queue QUEUE wait in the kernel and go on DELAY_US
 * after they came, in their order: half a tick of 1 ms earlier at most, and as a rule up to one later. Only
 * their numbers come here: nothing is copied, and a frame of 64 KB costs what a small one does. Says `ready`
 * and runs until it is killed, by whomever or with its parent; what waits then is lost.
 *
 * Exit codes: 1 with a message (no such namespace, a kernel without NETFILTER_NETLINK_QUEUE or BPF_SYSCALL,
 * QUEUE in use), 2 for wrong arguments. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netfilter/nfnetlink_queue.h>
#include <linux/netlink.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* More than 10 Gbit/s bring in 100 ms, even in packets of 1500 bytes. What comes to a full queue is dropped.
 */
#define QUEUE_PACKETS (1u << 17)
/* For what comes between a first packet and the wake-up by it: a message that finds no room takes its packet
 * along. */
#define SOCKET_BYTES (256 << 20)
/* All hosts of a core share its wake-ups, one per tick while anything waits. Ticks half as long take 2 % more
 * of two cores at 1 Gbit/s, from whoever is measured on them. */
#define TICK_NS 1000000u

/* Of one tick; they wait together. */
struct arrival {
  uint64_t due_ns;
  uint32_t last_packet; /* this and all before it */
};

/* What the kernel tells of a queue in memory that this process shares: to be told by a message each costs
 * more than to let the packet go. */
struct news {
  _Atomic uint32_t last_packet;
  /* Of the message that tells of a packet: 0 while somebody looks here by himself, 1 to be woken by it. */
  _Atomic uint32_t kept_bytes;
};

struct line {
  int netlink;
  struct news* news;
  uint32_t seen_packet;
  struct arrival* arrivals; /* a ring */
  uint32_t head, tail;
};

/* The hosts whose packets one core takes through its kernel, as it would those of their NICs. */
struct core {
  int cpu;
  struct line* lines;
  int hosts;
};

struct message {
  struct nlmsghdr netlink;
  struct nfgenmsg queue;
  char attributes[64];
};

static uint16_t queue;
static uint64_t delay_ns;
static uint32_t ring_size;

static void die(const char* what) {
  fprintf(stderr, "delayline: %s: %s\n", what, strerror(errno));
  exit(1);
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct message begin(uint16_t kind, uint16_t flags) {
  return (struct message){
      .netlink = {.nlmsg_len = NLMSG_LENGTH(sizeof(struct nfgenmsg)),
                  .nlmsg_type = (NFNL_SUBSYS_QUEUE << 8) | kind,
                  .nlmsg_flags = NLM_F_REQUEST | flags},
      .queue = {.nfgen_family = AF_UNSPEC, .version = NFNETLINK_V0, .res_id = htons(queue)},
  };
}

static void add(struct message* message, uint16_t kind, const void* value, uint16_t bytes) {
  struct nlattr* attribute = (struct nlattr*)((char*)message + message->netlink.nlmsg_len);
  attribute->nla_type = kind;
  attribute->nla_len = (uint16_t)(NLA_HDRLEN + bytes);
  memcpy((char*)attribute + NLA_HDRLEN, value, bytes);
  message->netlink.nlmsg_len += NLA_ALIGN(attribute->nla_len);
}

static void configure(int netlink, const struct message* message) {
  struct {
    struct nlmsghdr header;
    struct nlmsgerr error;
    char rest[256];
  } answer;
  if (send(netlink, message, message->netlink.nlmsg_len, 0) < 0 ||
      recv(netlink, &answer, sizeof answer, 0) < 0)
    die("netlink");
  if (answer.header.nlmsg_type == NLMSG_ERROR && answer.error.error) {
    errno = -answer.error.error;
    die("netfilter's queue");
  }
}

static int bpf(enum bpf_cmd command, union bpf_attr* attributes) {
  int result = (int)syscall(SYS_bpf, command, attributes, sizeof *attributes);
  if (result < 0) die("bpf");
  return result;
}

/* Has the kernel write the number of every packet that `netlink` is told of into the news, and drop the
 * message. Before any comes: one of before would wait for the next. */
static struct news* share_news(int netlink) {
  /* The kernel wants zeros in all that it has no name for, which an initializer need not leave in a union. */
  union bpf_attr attributes;
  memset(&attributes, 0, sizeof attributes);
  attributes.map_type = BPF_MAP_TYPE_ARRAY;
  attributes.key_size = sizeof(uint32_t);
  attributes.value_size = sizeof(struct news);
  attributes.max_entries = 1;
  attributes.map_flags = BPF_F_MMAPABLE;
  int memory = bpf(BPF_MAP_CREATE, &attributes);
  struct news* news = mmap(NULL, sizeof *news, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (news == MAP_FAILED) die("mmap");

  /* The number is every packet's first attribute. */
  const int kind = offsetof(struct nlmsghdr, nlmsg_type);
  const int number = NLMSG_LENGTH(sizeof(struct nfgenmsg)) + NLA_HDRLEN;
  /* Loads from a message are in network byte order, and its kind is in the host's. */
  const int packet = htons((NFNL_SUBSYS_QUEUE << 8) | NFQNL_MSG_PACKET);
  const struct bpf_insn program[] = {
      {.code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = 6, .src_reg = 1},
      {.code = BPF_LD | BPF_ABS | BPF_H, .imm = kind},
      {.code = BPF_JMP | BPF_JNE | BPF_K, .dst_reg = 0, .imm = packet, .off = 6},
      {.code = BPF_LD | BPF_ABS | BPF_W, .imm = number},
      {.code = BPF_LD | BPF_IMM | BPF_DW, .dst_reg = 1, .src_reg = BPF_PSEUDO_MAP_VALUE, .imm = memory},
      {0},
      /* Not a plain store: the next load must not overtake it, or whoever falls asleep then is not woken. */
      {.code = BPF_STX | BPF_ATOMIC | BPF_W,
       .dst_reg = 1,
       .src_reg = 0,
       .off = offsetof(struct news, last_packet),
       .imm = BPF_XCHG},
      {.code = BPF_LDX | BPF_MEM | BPF_W,
       .dst_reg = 0,
       .src_reg = 1,
       .off = offsetof(struct news, kept_bytes)},
      {.code = BPF_JMP | BPF_EXIT},
      {.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 0},
      {.code = BPF_JMP | BPF_EXIT},
  };
  memset(&attributes, 0, sizeof attributes);
  attributes.prog_type = BPF_PROG_TYPE_SOCKET_FILTER;
  attributes.insn_cnt = sizeof program / sizeof program[0];
  attributes.insns = (uintptr_t)program;
  attributes.license = (uintptr_t) "Apache-2.0";
  int filter = bpf(BPF_PROG_LOAD, &attributes);
  if (setsockopt(netlink, SOL_SOCKET, SO_ATTACH_BPF, &filter, sizeof filter)) die("bpf");
  /* The socket keeps the program, and that the memory. */
  close(filter);
  close(memory);
  return news;
}

static struct line open_line(const char* namespace) {
  int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  int theirs = open(namespace, O_RDONLY | O_CLOEXEC);
  if (own < 0 || theirs < 0 || setns(theirs, CLONE_NEWNET)) die(namespace);
  int netlink = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_NETFILTER);
  if (netlink < 0) die("netlink");
  /* Whoever kills or freezes all that is in the namespace does not mean this process. */
  if (setns(own, CLONE_NEWNET)) die("own namespace");
  close(own);
  close(theirs);
  int bytes = SOCKET_BYTES;
  setsockopt(netlink, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);

  struct message message = begin(NFQNL_MSG_CONFIG, NLM_F_ACK);
  struct nfqnl_msg_config_cmd bind_queue = {.command = NFQNL_CFG_CMD_BIND, .pf = htons(AF_INET)};
  add(&message, NFQA_CFG_CMD, &bind_queue, sizeof bind_queue);
  configure(netlink, &message);
  message = begin(NFQNL_MSG_CONFIG, NLM_F_ACK);
  struct nfqnl_msg_config_params numbers_only = {.copy_mode = NFQNL_COPY_META};
  uint32_t packets = htonl(QUEUE_PACKETS), whole_frames = htonl(NFQA_CFG_F_GSO);
  add(&message, NFQA_CFG_PARAMS, &numbers_only, sizeof numbers_only);
  add(&message, NFQA_CFG_QUEUE_MAXLEN, &packets, sizeof packets);
  add(&message, NFQA_CFG_FLAGS, &whole_frames, sizeof whole_frames);
  add(&message, NFQA_CFG_MASK, &whole_frames, sizeof whole_frames);
  configure(netlink, &message);

  struct line line = {
      .netlink = netlink, .news = share_news(netlink), .arrivals = calloc(ring_size, sizeof(struct arrival))};
  if (!line.arrivals) die("memory");
  return line;
}

/* Puts all that has come in line. */
static void take_in(struct line* line, uint64_t now) {
  uint32_t last_packet = line->news->last_packet;
  if (last_packet == line->seen_packet) return;
  line->seen_packet = last_packet;
  line->arrivals[line->head++ % ring_size] = (struct arrival){now + delay_ns, last_packet};
}

/* Lets go what is due. */
static void let_go(struct line* line, uint64_t now) {
  bool any = false;
  uint32_t last_packet = 0;
  /* What has come since the last tick counts from this one. Half a tick too early is better than one too
   * late: ticks do not come to the microsecond. */
  for (; line->tail != line->head && line->arrivals[line->tail % ring_size].due_ns <= now + TICK_NS / 2;
       ++line->tail) {
    last_packet = line->arrivals[line->tail % ring_size].last_packet;
    any = true;
  }
  if (!any) return;
  struct message message = begin(NFQNL_MSG_VERDICT_BATCH, 0);
  struct nfqnl_msg_verdict_hdr accept = {.verdict = htonl(NF_ACCEPT), .id = htonl(last_packet)};
  add(&message, NFQA_VERDICT_HDR, &accept, sizeof accept);
  if (send(line->netlink, &message, message.netlink.nlmsg_len, 0) < 0 && errno != EINTR) die("netlink");
}

/* Sleeps until a packet comes to a core's empty lines. */
static void await_packet(const struct core* core, struct pollfd* sockets) {
  bool came = false;
  for (int host = 0; host < core->hosts; ++host) {
    struct line* line = &core->lines[host];
    line->news->kept_bytes = 1;
    came |= line->news->last_packet != line->seen_packet;
  }
  if (!came && poll(sockets, (nfds_t)core->hosts, -1) < 0 && errno != EINTR) die("poll");
  for (int host = 0; host < core->hosts; ++host) {
    char kept;
    core->lines[host].news->kept_bytes = 0;
    while (recv(core->lines[host].netlink, &kept, sizeof kept, MSG_DONTWAIT) >= 0) continue;
    if (errno != EAGAIN && errno != EINTR && errno != ENOBUFS) die("netlink");
  }
}

static void* run(void* argument) {
  const struct core* core = argument;
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(core->cpu, &cpus);
  sched_setaffinity(0, sizeof cpus, &cpus);
  struct pollfd* sockets = calloc((size_t)core->hosts, sizeof *sockets);
  if (!sockets) die("memory");
  for (int host = 0; host < core->hosts; ++host)
    sockets[host] = (struct pollfd){.fd = core->lines[host].netlink, .events = POLLIN};
  for (;;) {
    uint64_t now = now_ns();
    bool waits = false;
    for (int host = 0; host < core->hosts; ++host) {
      struct line* line = &core->lines[host];
      take_in(line, now);
      let_go(line, now);
      waits |= line->tail != line->head;
    }
    if (waits) {
      uint64_t next = now / TICK_NS * TICK_NS + TICK_NS;
      struct timespec tick = {(time_t)(next / 1000000000u), (long)(next % 1000000000u)};
      clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &tick, NULL);
    } else {
      await_packet(core, sockets);
    }
  }
  return NULL;
}

int main(int count, char** words) {
  if (count < 4) {
    fprintf(stderr, "usage: delayline QUEUE DELAY_US NAMESPACE_FILE...\n");
    return 2;
  }
  queue = (uint16_t)strtoul(words[1], NULL, 10);
  delay_ns = strtoull(words[2], NULL, 10) * 1000;
  /* One arrival per tick at most, but for a first one between ticks. */
  ring_size = (uint32_t)(delay_ns / TICK_NS + 16);
  int hosts = count - 3;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  /* Before all that computes, as a kernel's own timers are: else latency is as long as others' turns. */
  struct sched_param priority = {.sched_priority = 1};
  sched_setscheduler(0, SCHED_FIFO, &priority);
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) die("cores");
  struct core* cores = calloc((size_t)hosts, sizeof *cores);
  if (!cores) die("memory");
  int used = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE && used < hosts; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) cores[used++].cpu = cpu;
  for (int index = 0; index < used; ++index) {
    struct core* core = &cores[index];
    core->lines = calloc((size_t)hosts, sizeof *core->lines);
    if (!core->lines) die("memory");
    for (int host = index; host < hosts; host += used)
      core->lines[core->hosts++] = open_line(words[3 + host]);
  }
  printf("ready\n");
  fflush(stdout);
  for (int index = 0; index < used; ++index) {
    pthread_t thread;
    if ((errno = pthread_create(&thread, NULL, run, &cores[index]))) die("thread");
  }
  for (;;) pause();
}
