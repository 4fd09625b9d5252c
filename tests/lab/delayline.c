/* Latency for what arrives in network namespaces: delayline QUEUE DELAY_US NAMESPACE_FILE...
 *
 * Packets that a firewall rule there sends to netfilter's queue QUEUE wait in the kernel and go on DELAY_US
 * after they came, in their order, to a tick of 500 us exact. Only their numbers come here: nothing is
 * copied, and a frame of 64 KB costs what a small one does. Says `ready` and runs until it is killed, by
 * whomever or with its parent; what waits then is lost.
 *
 * Exit codes: 1 with a message (no such namespace, a kernel without NETFILTER_NETLINK_QUEUE, QUEUE in use), 2
 * for wrong arguments. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netfilter/nfnetlink_queue.h>
#include <linux/netlink.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* More than 10 Gbit/s bring in 100 ms, even in packets of 1500 bytes. What comes to a full queue is dropped.
 */
#define QUEUE_PACKETS (1u << 17)
#define SOCKET_BYTES (256 << 20)
#define PACKETS_AT_ONCE 64
/* All hosts share its wake-ups, one per tick while anything waits; one per packet costs a fifth of two cores
 * at 1 Gbit/s. */
#define TICK_NS 500000u

/* Of one tick; they wait together. */
struct arrival {
  uint64_t due_ns;
  uint32_t last_packet; /* this and all before it */
};

struct line {
  int netlink;
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

  struct line line = {.netlink = netlink, .arrivals = calloc(ring_size, sizeof(struct arrival))};
  if (!line.arrivals) die("memory");
  return line;
}

/* Puts all that has come in line. */
static void take_in(struct line* line, uint64_t now) {
  static _Thread_local char buffers[PACKETS_AT_ONCE][1024];
  bool any = false;
  uint32_t last_packet = 0;
  for (int count = PACKETS_AT_ONCE; count == PACKETS_AT_ONCE;) {
    struct iovec parts[PACKETS_AT_ONCE];
    struct mmsghdr messages[PACKETS_AT_ONCE] = {0};
    for (int index = 0; index < PACKETS_AT_ONCE; ++index) {
      parts[index] = (struct iovec){buffers[index], sizeof buffers[index]};
      messages[index].msg_hdr.msg_iov = &parts[index];
      messages[index].msg_hdr.msg_iovlen = 1;
    }
    count = recvmmsg(line->netlink, messages, PACKETS_AT_ONCE, MSG_DONTWAIT, NULL);
    if (count < 0 && errno != EAGAIN && errno != EINTR && errno != ENOBUFS) die("netlink");
    for (int index = 0; index < count; ++index) {
      const struct nlmsghdr* header = (const struct nlmsghdr*)buffers[index];
      const struct nlattr* first =
          (const struct nlattr*)(buffers[index] + NLMSG_LENGTH(sizeof(struct nfgenmsg)));
      /* The number is every packet's first attribute. */
      if (header->nlmsg_type != ((NFNL_SUBSYS_QUEUE << 8) | NFQNL_MSG_PACKET) ||
          first->nla_type != NFQA_PACKET_HDR)
        continue;
      last_packet = ntohl(((const struct nfqnl_msg_packet_hdr*)((const char*)first + NLA_HDRLEN))->packet_id);
      any = true;
    }
  }
  if (any) line->arrivals[line->head++ % ring_size] = (struct arrival){now + delay_ns, last_packet};
}

/* Lets go what is due. */
static void let_go(struct line* line, uint64_t now) {
  bool any = false;
  uint32_t last_packet = 0;
  /* Half a tick too early or too late: on average when it should. */
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
    } else if (poll(sockets, (nfds_t)core->hosts, -1) < 0 && errno != EINTR) {
      die("poll");
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
