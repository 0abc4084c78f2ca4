/* A libibverbs whose one device does nothing, at once: what is measured over it is the software
 * above the device. Built by bench_rdma.py against the system's <infiniband/verbs.h>. */

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr
#define RING 8192

struct ring { struct ibv_cq cq; uint64_t ids[RING]; unsigned head, tail; };

static struct ibv_device device = { .name = "standin0" };
static uint32_t next_number = 17;

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct ring *ring = (struct ring *)qp->send_cq;
	for (; wr; wr = wr->next)
		if (wr->send_flags & IBV_SEND_SIGNALED)
			ring->ids[ring->head++ % RING] = wr->wr_id;
	return 0;
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
	struct ring *ring = (struct ring *)cq;
	int count = 0;
	while (count < most && ring->tail != ring->head) {
		memset(&wc[count], 0, sizeof *wc);
		wc[count++].wr_id = ring->ids[ring->tail++ % RING];
	}
	return count;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited) { return 0; }

struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list = calloc(2, sizeof *list);
	list[0] = &device;
	if (count)
		*count = 1;
	return list;
}
void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }
__be64 ibv_get_device_guid(struct ibv_device *d) { return 1; }
struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	struct ibv_context *context = calloc(1, sizeof *context);
	context->device = d;
	context->ops.post_send = post_send;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	context->async_fd = eventfd(0, 0);
	context->num_comp_vectors = 1;
	return context;
}
int ibv_close_device(struct ibv_context *context) { close(context->async_fd); return 0; }
int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *a)
{
	memset(a, 0, sizeof *a);
	a->max_qp = a->max_qp_wr = a->max_cq = a->max_cqe = a->max_mr = 1 << 16;
	a->max_mr_size = 1ull << 40;
	a->max_qp_rd_atom = 16;
	a->phys_port_cnt = 1;
	return 0;
}
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *c)
{
	struct ibv_port_attr *a = (struct ibv_port_attr *)c;
	a->state = IBV_PORT_ACTIVE;
	a->max_mtu = a->active_mtu = IBV_MTU_4096;
	a->max_msg_sz = 1 << 30;
	a->gid_tbl_len = 2;
	a->link_layer = IBV_LINK_LAYER_ETHERNET;
	return 0;
}
int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	memset(gid, index + 1, sizeof *gid);
	return 0;
}
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = calloc(1, sizeof *pd);
	pd->context = context;
	return pd;
}
int ibv_dealloc_pd(struct ibv_pd *pd) { free(pd); return 0; }
static struct ibv_mr *made(struct ibv_pd *pd, void *address, size_t length)
{
	struct ibv_mr *mr = calloc(1, sizeof *mr);
	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = address;
	mr->length = length;
	mr->lkey = mr->rkey = next_number++;
	return mr;
}
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
	return made(pd, address, length);
}
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova,
				unsigned int access)
{
	return made(pd, address, length);
}
int ibv_dereg_mr(struct ibv_mr *mr) { free(mr); return 0; }
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct ibv_comp_channel *channel = calloc(1, sizeof *channel);
	channel->context = context;
	channel->fd = eventfd(0, 0);
	return channel;
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	close(channel->fd);
	free(channel);
	return 0;
}
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *user,
			     struct ibv_comp_channel *channel, int vector)
{
	struct ring *ring = calloc(1, sizeof *ring);
	ring->cq.context = context;
	ring->cq.channel = channel;
	ring->cq.cq_context = user;
	ring->cq.cqe = cqe;
	return &ring->cq;
}
int ibv_destroy_cq(struct ibv_cq *cq) { free(cq); return 0; }
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **user) { return -1; }
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count) { }
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp *qp = calloc(1, sizeof *qp);
	qp->context = pd->context;
	qp->pd = pd;
	qp->send_cq = attr->send_cq;
	qp->recv_cq = attr->recv_cq;
	qp->qp_type = attr->qp_type;
	qp->qp_num = next_number++;
	return qp;
}
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) { return 0; }
int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	memset(attr, 0, sizeof *attr);
	return 0;
}
int ibv_destroy_qp(struct ibv_qp *qp) { free(qp); return 0; }
int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) { return -1; }
void ibv_ack_async_event(struct ibv_async_event *event) { }

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *a) { return 0; }

int ibv_destroy_ah(struct ibv_ah *ah) { return 0; }
struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr) { return 0; }
int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask) { return -1; }
int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr) { return -1; }
int ibv_destroy_srq(struct ibv_srq *srq) { return -1; }
const char *ibv_event_type_str(enum ibv_event_type type) { return "event"; }
const char *ibv_port_state_str(enum ibv_port_state state) { return "state"; }
const char *ibv_wc_status_str(enum ibv_wc_status status) { return "status"; }
const char *ibv_node_type_str(enum ibv_node_type type) { return "node"; }
