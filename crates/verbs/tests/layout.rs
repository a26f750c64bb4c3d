//! Our bindings of libibverbs against its headers, as seen by a C compiler: offsets, sizes, constants.

#![allow(clippy::unwrap_used)]

use std::mem::{offset_of, size_of};
use std::process::Command;

use bifrost_verbs::rdma_core::sys;

/// Pairs of a C expression and its required value.
macro_rules! offsets {
    ($list:ident: $($c:literal $rust:ident { $($field:ident),* $(; $($c_field:literal = $other:ident),*)? })*) => {$(
        $($list.push((format!("offsetof({}, {})", $c, stringify!($field)), offset_of!(sys::$rust, $field) as u64));)*
        $($($list.push((format!("offsetof({}, {})", $c, $c_field), offset_of!(sys::$rust, $other) as u64));)*)?
    )*};
}

macro_rules! sizes {
    ($list:ident: $($c:literal $rust:ident),*) => {
        $($list.push((format!("sizeof({})", $c), size_of::<sys::$rust>() as u64));)*
    };
}

macro_rules! constants {
    ($list:ident: $($prefix:literal { $($name:ident),* })*) => {
        $($($list.push((format!("{}{}", $prefix, stringify!($name)), sys::$name as u64));)*)*
    };
}

fn expected() -> Vec<(String, u64)> {
    let mut list = Vec::new();
    offsets! { list:
        "struct ibv_pd" Pd { context, handle }
        "struct ibv_comp_channel" CompChannel { context, fd, refcnt }
        "struct ibv_context_ops" ContextOps { poll_cq, req_notify_cq, post_send, post_recv }
        "struct ibv_context" Context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        "struct ibv_values_ex" ValuesEx { comp_mask, raw_clock }
        "struct ibv_device_attr" DeviceAttr {
            max_qp, max_qp_wr, device_cap_flags, max_sge, max_cq, max_cqe, max_mr, max_pd, max_pkeys, local_ca_ack_delay, phys_port_cnt
        }
        "struct ibv_device_attr_ex" DeviceAttrEx {
            orig_attr, comp_mask, odp_caps, completion_timestamp_mask, hca_core_clock, device_cap_flags_ex
        }
        "struct ibv_port_attr" PortAttr {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, lid, sm_lid, link_layer, flags, port_cap_flags2
        }
        "struct ibv_gid_entry" GidEntry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        "struct ibv_global_route" GlobalRoute { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        "struct ibv_ah_attr" AhAttr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        "struct ibv_qp_cap" QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        "struct ibv_qp_init_attr" QpInitAttr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        "struct ibv_qp_attr" QpAttr {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr,
            alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic,
            min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit
        }
        "struct ibv_qp" Qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num }
        "struct ibv_mr" Mr { context, pd, addr, length, handle, lkey, rkey }
        "struct ibv_cq" Cq {
            context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed, async_events_completed
        }
        "struct ibv_cq_ex" CqEx {
            comp_mask, status, wr_id, start_poll, next_poll, end_poll, read_opcode, read_vendor_err, read_byte_len, read_imm_data,
            read_qp_num, read_src_qp, read_wc_flags, read_completion_ts
        }
        "struct ibv_cq_init_attr_ex" CqInitAttrEx {
            cqe, cq_context, channel, comp_vector, wc_flags, comp_mask, flags, parent_domain
        }
        "struct ibv_wc" Wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits
        }
        "struct ibv_sge" Sge { addr, length, lkey }
        "struct ibv_send_wr" SendWr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr; "qp_type" = xrc_remote_srqn, "bind_mw" = rest
        }
        "struct ibv_recv_wr" RecvWr { wr_id, next, sg_list, num_sge }
        "struct ibv_async_event" AsyncEvent { element, event_type }
    }
    let wr = offset_of!(sys::SendWr, wr) as u64;
    let remote = [
        ("rdma.remote_addr", offset_of!(sys::RemoteMemory, remote_addr)),
        ("rdma.rkey", offset_of!(sys::RemoteMemory, rkey)),
        ("ud.ah", offset_of!(sys::RemoteQueue, ah)),
        ("ud.remote_qpn", offset_of!(sys::RemoteQueue, remote_qpn)),
        ("ud.remote_qkey", offset_of!(sys::RemoteQueue, remote_qkey)),
    ];
    list.extend(remote.map(|(field, at)| (format!("offsetof(struct ibv_send_wr, wr.{field})"), wr + at as u64)));
    // This structure grows at its start: offsets are counted from its end.
    let whole = size_of::<sys::VerbsContext>();
    let tail = [
        ("query_rt_values", offset_of!(sys::VerbsContext, query_rt_values)),
        ("create_cq_ex", offset_of!(sys::VerbsContext, create_cq_ex)),
        ("query_device_ex", offset_of!(sys::VerbsContext, query_device_ex)),
        ("sz", offset_of!(sys::VerbsContext, size)),
        ("context", offset_of!(sys::VerbsContext, context)),
    ];
    list.extend(tail.map(|(field, at)| {
        let c = format!("sizeof(struct verbs_context) - offsetof(struct verbs_context, {field})");
        (c, (whole - at) as u64)
    }));
    sizes! { list:
        "struct ibv_context" Context, "struct ibv_values_ex" ValuesEx, "struct ibv_device_attr" DeviceAttr,
        "struct ibv_gid_entry" GidEntry, "struct ibv_ah_attr" AhAttr, "struct ibv_qp_init_attr" QpInitAttr,
        "struct ibv_qp_attr" QpAttr, "struct ibv_mr" Mr, "struct ibv_cq" Cq, "struct ibv_cq_init_attr_ex" CqInitAttrEx,
        "struct ibv_poll_cq_attr" PollCqAttr, "struct ibv_wc" Wc, "struct ibv_sge" Sge, "struct ibv_send_wr" SendWr,
        "struct ibv_recv_wr" RecvWr, "struct ibv_async_event" AsyncEvent
    }
    // The library writes no more than the space allocated here.
    list.push((format!("sizeof(struct ibv_port_attr) <= {}", size_of::<sys::PortAttr>()), 1));
    constants! { list:
        "IBV_" {
            GID_TYPE_ROCE_V2, PORT_ACTIVE, QPT_RC, QPT_UC, QPT_UD, QPS_RESET, QPS_INIT, QPS_RTR, QPS_RTS, QPS_ERR,
            QP_STATE, QP_ACCESS_FLAGS, QP_PKEY_INDEX, QP_PORT, QP_QKEY, QP_AV, QP_PATH_MTU, QP_TIMEOUT, QP_RETRY_CNT, QP_RNR_RETRY,
            QP_RQ_PSN, QP_MAX_QP_RD_ATOMIC, QP_MIN_RNR_TIMER, QP_SQ_PSN, QP_MAX_DEST_RD_ATOMIC, QP_DEST_QPN, ACCESS_LOCAL_WRITE,
            ACCESS_REMOTE_WRITE, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM, SEND_SIGNALED, SEND_INLINE,
            WC_SUCCESS, WC_LOC_LEN_ERR, WC_LOC_QP_OP_ERR, WC_LOC_PROT_ERR, WC_WR_FLUSH_ERR, WC_LOC_ACCESS_ERR, WC_REM_ACCESS_ERR,
            WC_RETRY_EXC_ERR, WC_RNR_RETRY_EXC_ERR, WC_RECV_RDMA_WITH_IMM, WC_GRH, WC_WITH_IMM, WC_EX_WITH_BYTE_LEN,
            WC_EX_WITH_IMM, WC_EX_WITH_SRC_QP, WC_EX_WITH_COMPLETION_TIMESTAMP, VALUES_MASK_RAW_CLOCK
        }
    }
    list
}

#[test]
fn structures_match_the_headers() {
    let directory = std::env::temp_dir().join(format!("bifrost-verbs-layout-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let (source, program) = (directory.join("layout.c"), directory.join("layout"));
    let expected = expected();
    let lines: String =
        expected.iter().map(|(c, _)| format!("    printf(\"%llu\\n\", (unsigned long long)({c}));\n")).collect();
    let text = format!(
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n{lines}    return 0;\n}}\n"
    );
    std::fs::write(&source, text).unwrap();
    let has_headers = std::path::Path::new("/usr/include/infiniband/verbs.h").exists();
    let compiled = Command::new("cc").arg("-o").arg(&program).arg(&source).output();
    match compiled {
        Ok(output) if output.status.success() => {
            let output = Command::new(&program).output().unwrap();
            let said = String::from_utf8(output.stdout).unwrap();
            let said: Vec<u64> = said.lines().map(|line| line.parse().unwrap()).collect();
            assert_eq!(said.len(), expected.len());
            for ((c, ours), said) in expected.iter().zip(said) {
                assert_eq!(*ours, said, "{c}");
            }
        }
        Ok(output) if has_headers => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        _ => eprintln!("SKIPPED: no C compiler, or no headers of libibverbs (Debian: libibverbs-dev)"),
    }
    let _ = std::fs::remove_dir_all(&directory);
}
