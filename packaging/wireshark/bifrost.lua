-- Wireshark dissector for the BIFROST reliable transport (docs/PROTOCOL.md; sections are cited as §).
--
-- Copy this file into the directory that Help > About Wireshark > Folders calls "Personal Lua Plugins", or load it once:
--   tshark -X lua_script:bifrost.lua -r capture.pcapng -Y 'bifrost.psn >= 1000 && bifrost.ret'
-- It takes UDP destination port 4794; another one: Edit > Preferences > Protocols > BIFROST, or `-o bifrost.port:4794`.

local bifrost = Proto("bifrost", "BIFROST reliable transport")

local types = {
    [1] = "DATA", [2] = "ACK", [3] = "REQUEST", [4] = "RESPONSE", [5] = "REJECT", [6] = "RESET", [7] = "SKIP",
    [8] = "BUNDLE",
}
local cc_types = { [0] = "none", [1] = "Swift" }
local ack_types = { [0] = "cumulative", [1] = "selective", [2] = "rate-limited", [3] = "not taken" }
local reasons = { [1] = "version", [2] = "unknown vNIC", [3] = "resources", [4] = "policy" }

local VXLAN_LEN, DATA_LEN, ACK_LEN, SHORT_LEN, SETUP_LEN, LENGTH_LEN = 8, 16, 32, 12, 40, 2
local LATEST, BUNDLE_VERSION, HAS_REFUSALS = 4, 3, 4

local f = {
    vni = ProtoField.uint32("bifrost.vni", "VNI", base.DEC),
    type = ProtoField.uint8("bifrost.type", "Packet Type", base.DEC, types),
    version = ProtoField.uint8("bifrost.version", "Version", base.DEC, nil, 0xf0),
    cc = ProtoField.uint8("bifrost.cc", "CC Type", base.DEC, cc_types, 0x0f),
    -- DATA, probe, SKIP (§3.1, §3.5)
    se = ProtoField.bool("bifrost.se", "Probe", 8, nil, 0x80),
    ack = ProtoField.bool("bifrost.ack", "Acknowledge at once", 8, nil, 0x40),
    dir = ProtoField.bool("bifrost.dir", "From the responder", 8, nil, 0x20),
    ece = ProtoField.bool("bifrost.ece", "Sent ECN-capable", 8, nil, 0x10),
    ret = ProtoField.bool("bifrost.ret", "Retransmission", 8, nil, 0x08),
    path = ProtoField.uint8("bifrost.path", "Path ID", base.DEC),
    distance = ProtoField.uint8("bifrost.distance", "Flow distance", base.DEC),
    depends = ProtoField.uint32("bifrost.previous", "Previous PSN of the flow", base.DEC),
    psn = ProtoField.uint32("bifrost.psn", "Packet Sequence Number", base.DEC),
    cid = ProtoField.uint32("bifrost.cid", "Destination CID", base.HEX),
    worker = ProtoField.uint8("bifrost.worker", "Worker of the destination", base.DEC),
    timestamp = ProtoField.uint32("bifrost.timestamp", "Timestamp Value (ticks of 64 ns)", base.DEC),
    -- ACK (§3.3)
    hops = ProtoField.uint8("bifrost.hops", "Hop Count", base.DEC, nil, 0x0f),
    ack_value = ProtoField.uint8("bifrost.ack_value", "ACK Value (reserved)", base.DEC, nil, 0xf8),
    ack_type = ProtoField.uint8("bifrost.ack_type", "ACK Type", base.DEC, ack_types, 0x07),
    echo = ProtoField.uint32("bifrost.echo", "Timestamp Echo", base.DEC),
    nic_rx = ProtoField.uint32("bifrost.nic_rx", "Timestamp NIC RX", base.DEC),
    held = ProtoField.uint32("bifrost.held_us", "Time at the receiver (µs)", base.DEC),
    num_ack = ProtoField.uint16("bifrost.num_ack", "Num_ACK", base.DEC),
    num_ece = ProtoField.uint16("bifrost.num_ece", "Num_ece", base.DEC),
    words = ProtoField.uint8("bifrost.bitmap_len", "PSN_bitmap_len", base.DEC),
    base_psn = ProtoField.uint32("bifrost.psn_base", "PSN_base", base.DEC),
    bitmap = ProtoField.bytes("bifrost.bitmap", "PSN_bitmap"),
    word = ProtoField.uint32("bifrost.bitmap.word", "PSN_bitmap word", base.HEX),
    acked = ProtoField.uint32("bifrost.bitmap.psn", "PSN of a set bit", base.DEC),
    -- Set-up and RESET (§3.2, §3.4)
    thread = ProtoField.uint8("bifrost.thread", "Thread ID", base.DEC),
    oldest = ProtoField.uint8("bifrost.oldest", "Lowest version accepted", base.DEC, nil, 0xf0),
    reason = ProtoField.uint8("bifrost.reason", "Reason", base.DEC, reasons, 0x0f),
    local_cid = ProtoField.uint32("bifrost.local_cid", "Local CID", base.HEX),
    to = ProtoField.ether("bifrost.to", "Destination vNIC"),
    from = ProtoField.ether("bifrost.from", "Source vNIC"),
    instance = ProtoField.uint64("bifrost.instance", "Instance (start of the daemon, µs since 1970)", base.DEC),
    generation = ProtoField.uint32("bifrost.generation", "Generation", base.DEC),
    window = ProtoField.uint16("bifrost.window", "Receive window (packets)", base.DEC),
    ack_delay = ProtoField.uint16("bifrost.ack_delay_us", "Longest ACK delay (µs)", base.DEC),
    -- BUNDLE (§3.6)
    length = ProtoField.uint16("bifrost.length", "Length of the packet", base.DEC),
    refusal = ProtoField.string("bifrost.refusal", "Must be refused (§16.1)"),
}
bifrost.fields = f

local refused = ProtoExpert.new("bifrost.refused", "A receiver refuses this packet (§16.1)", expert.group.MALFORMED,
    expert.severity.ERROR)
local again = ProtoExpert.new("bifrost.retransmission", "Retransmission", expert.group.SEQUENCE, expert.severity.NOTE)
bifrost.experts = { refused, again }

bifrost.prefs.port = Pref.uint("UDP port", 4794, "UDP destination port of BIFROST packets")

local ethernet = Dissector.get("eth_withoutfcs")
local data_dissector = Dissector.get("data")

-- A difference of PSNs, or a sum, modulo 2^32 (§6.1).
local function wrapped(number)
    return number % 4294967296
end

local function refuse(tree, range, reason)
    tree:add(f.refusal, range, reason):set_generated()
    tree:add_proto_expert_info(refused, "A receiver refuses this packet: " .. reason)
    return reason
end

local function first_bytes(tree, buffer)
    tree:add(f.type, buffer(0, 1))
    tree:add(f.version, buffer(1, 1))
    tree:add(f.cc, buffer(1, 1))
end

local function add_cid(tree, range)
    tree:add(f.cid, range)
    tree:add(f.worker, range(0, 1)):set_generated()
end

-- DATA, probe, SKIP. Gives what is to be shown in a line, and the reason of a refusal.
local function data(buffer, tree)
    if buffer:len() < DATA_LEN then return "", refuse(tree, buffer(), "short_datagram") end
    first_bytes(tree, buffer)
    local flags = buffer(2, 1)
    for _, field in ipairs({ f.se, f.ack, f.dir, f.ece, f.ret }) do tree:add(field, flags) end
    tree:add(f.path, flags, flags:bitfield(5, 3))
    local skip, probe, again_sent = buffer(0, 1):uint() == 7, flags:bitfield(0, 1) == 1, flags:bitfield(4, 1) == 1
    local version, psn, distance = buffer(1, 1):bitfield(0, 4), buffer(4, 4):uint(), buffer(3, 1):uint()
    if version < 2 then distance = 0 end
    tree:add(f.distance, buffer(3, 1), distance)
    tree:add(f.psn, buffer(4, 4))
    if distance > 0 then tree:add(f.depends, buffer(3, 1), wrapped(psn - distance)):set_generated() end
    add_cid(tree, buffer(8, 4))
    tree:add(f.timestamp, buffer(12, 4))
    if again_sent and not skip then tree:add_proto_expert_info(again) end
    local info = string.format("CID 0x%08x, PSN %u, path %d", buffer(8, 4):uint(), psn, flags:bitfield(5, 3))
    if distance > 0 then info = info .. ", distance " .. distance end
    if again_sent then info = info .. ", sent again" end
    local rest = buffer:len() - DATA_LEN
    local reason
    if version < 1 or version > LATEST then
        reason = "version"
    elseif buffer(8, 4):uint() == 0 then
        reason = "zero_cid"
    elseif (skip or probe) and rest > 0 then
        reason = "trailing_bytes"
    elseif not skip and not probe and rest < 14 then
        reason = "short_frame"
    end
    return info, reason and refuse(tree, buffer(), reason), not skip and not probe
end

local function add_bitmap(buffer, tree, psn_base, words)
    local bits = tree:add(f.bitmap, buffer(ACK_LEN, 4 * words))
    local count = 0
    for word = 0, words - 1 do
        local range = buffer(ACK_LEN + 4 * word, 4)
        bits:add(f.word, range)
        for bit = 0, 31 do
            if range:bitfield(bit, 1) == 1 then
                count = count + 1
                bits:add(f.acked, range, wrapped(psn_base + 32 * word + bit)):set_generated()
            end
        end
    end
    bits:append_text(" (" .. count .. " set)")
    return count
end

local function ack(buffer, tree)
    if buffer:len() < ACK_LEN then return "", refuse(tree, buffer(), "short_datagram") end
    first_bytes(tree, buffer)
    tree:add(f.se, buffer(2, 1))
    tree:add(f.path, buffer(2, 1), buffer(2, 1):bitfield(1, 3))
    tree:add(f.hops, buffer(2, 1))
    tree:add(f.ack_value, buffer(3, 1))
    tree:add(f.ack_type, buffer(3, 1))
    tree:add(f.psn, buffer(4, 4))
    add_cid(tree, buffer(8, 4))
    tree:add(f.timestamp, buffer(12, 4))
    tree:add(f.echo, buffer(16, 4))
    tree:add(f.nic_rx, buffer(20, 4))
    local held = wrapped(buffer(12, 4):uint() - buffer(20, 4):uint())
    if held < 2147483648 then tree:add(f.held, buffer(20, 4), math.floor(held * 64 / 1000)):set_generated() end
    local counts = buffer(24, 4)
    tree:add(f.num_ack, counts, counts:bitfield(0, 11))
    tree:add(f.num_ece, counts, counts:bitfield(11, 11))
    local words, psn_base, rest = counts:bitfield(22, 4), buffer(28, 4):uint(), buffer:len() - ACK_LEN
    tree:add(f.words, counts, words)
    tree:add(f.base_psn, buffer(28, 4))
    local info = string.format("CID 0x%08x, base %u", buffer(8, 4):uint(), psn_base)
    local version, reason = buffer(1, 1):bitfield(0, 4), nil
    if version < 1 or version > LATEST then
        reason = "version"
    elseif buffer(3, 1):bitfield(5, 3) > (version < HAS_REFUSALS and 2 or 3) then
        reason = "ack_type"
    elseif buffer(8, 4):uint() == 0 then
        reason = "zero_cid"
    elseif words > 8 then
        reason = "bitmap_length"
    elseif rest < 4 * words then
        reason = "bitmap_truncated"
    elseif rest > 4 * words then
        reason = "trailing_bytes"
    end
    if words > 0 and words <= 8 and rest >= 4 * words then
        info = info .. " + " .. add_bitmap(buffer, tree, psn_base, words)
    end
    info = info .. string.format(", echoes PSN %u of path %d", buffer(4, 4):uint(), buffer(2, 1):bitfield(1, 3))
    return info, reason and refuse(tree, buffer(), reason)
end

local function group(range)
    return range(0, 1):bitfield(7, 1) == 1
end

-- REQUEST, RESPONSE, REJECT.
local function setup(buffer, tree)
    if buffer:len() < SHORT_LEN then return "", refuse(tree, buffer(), "short_datagram") end
    first_bytes(tree, buffer)
    local kind, version, reserved = buffer(0, 1):uint(), buffer(1, 1):bitfield(0, 4), buffer(3, 1)
    tree:add(f.thread, buffer(2, 1))
    if kind == 3 then tree:add(f.oldest, reserved) end
    if kind == 5 then tree:add(f.reason, reserved) end
    tree:add(f.local_cid, buffer(4, 4))
    add_cid(tree, buffer(8, 4))
    if buffer:len() < SETUP_LEN then return "", refuse(tree, buffer(), "body_truncated") end
    tree:add(f.to, buffer(12, 6))
    tree:add(f.from, buffer(18, 6))
    tree:add(f.instance, buffer(24, 8))
    tree:add(f.generation, buffer(32, 4))
    tree:add(f.window, buffer(36, 2))
    tree:add(f.ack_delay, buffer(38, 2))
    local why, oldest = reserved:bitfield(4, 4), reserved:bitfield(0, 4)
    local no_local, no_destination = buffer(4, 4):uint() == 0, buffer(8, 4):uint() == 0
    local info = string.format("%s > %s", tostring(buffer(18, 6):ether()), tostring(buffer(12, 6):ether()))
    if kind == 5 then
        info = info .. ": " .. (reasons[why] or "unknown reason")
    else
        info = info .. string.format(", local CID 0x%08x", buffer(4, 4):uint())
    end
    local reason
    if buffer:len() > SETUP_LEN then
        reason = "trailing_bytes"
    elseif kind == 5 and not reasons[why] then
        reason = "reject_reason"
    elseif version == 0 or (kind == 4 and version > LATEST) then
        reason = "version"
    elseif kind == 3 and (oldest == 0 or oldest > version) then
        reason = "version_range"
    elseif (kind ~= 5 and no_local) or (kind ~= 3 and no_destination) then
        reason = "zero_cid"
    elseif group(buffer(12, 6)) or group(buffer(18, 6)) then
        reason = "group_vnic"
    elseif kind ~= 5 and buffer(36, 2):uint() == 0 then
        reason = "zero_window"
    end
    return info, reason and refuse(tree, buffer(), reason)
end

local function reset(buffer, tree)
    if buffer:len() < SHORT_LEN then return "", refuse(tree, buffer(), "short_datagram") end
    first_bytes(tree, buffer)
    tree:add(f.thread, buffer(2, 1))
    tree:add(f.local_cid, buffer(4, 4))
    add_cid(tree, buffer(8, 4))
    local reason
    if buffer(1, 1):bitfield(0, 4) == 0 then
        reason = "version"
    elseif buffer(4, 4):uint() == 0 then
        reason = "zero_cid"
    elseif buffer:len() > SHORT_LEN then
        reason = "trailing_bytes"
    end
    return string.format("unknown CID 0x%08x", buffer(4, 4):uint()), reason and refuse(tree, buffer(), reason)
end

local by_type = { [1] = data, [2] = ack, [3] = setup, [4] = setup, [5] = setup, [6] = reset, [7] = data }

-- One packet that is no bundle.
local function one(packet, pinfo, root, tree)
    local kind = packet(0, 1):uint()
    local dissect = by_type[kind]
    if not dissect then
        tree:add(f.type, packet(0, 1))
        refuse(tree, packet(0, 1), "packet_type")
        pinfo.cols.info = "refused: packet_type"
        return
    end
    local info, reason, frame = dissect(packet, tree)
    local name = types[kind]
    if kind == 1 and packet:len() > 2 and packet(2, 1):bitfield(0, 1) == 1 then name = "PROBE" end
    tree:append_text(", " .. name .. (info ~= "" and ", " .. info or ""))
    local text = name .. (info ~= "" and " " .. info or "") .. (reason and " [refused: " .. reason .. "]" or "")
    pinfo.cols.info = text
    if frame and not reason then
        ethernet:call(packet(DATA_LEN):tvb(), pinfo, root)
        -- The inner protocols have written theirs: both are of interest.
        pinfo.cols.protocol:prepend("BIFROST/")
        pinfo.cols.info:append(" {" .. text .. "}")
    elseif frame and packet:len() > DATA_LEN then
        data_dissector:call(packet(DATA_LEN):tvb(), pinfo, root)
    end
end

-- Why a bundle is refused as a whole; nil if it is not.
local function bundle_refusal(packet)
    if packet:len() < SHORT_LEN then return "short_datagram" end
    local version = packet(1, 1):bitfield(0, 4)
    if version ~= BUNDLE_VERSION then return "version" end
    if packet(8, 4):uint() == 0 then return "zero_cid" end
    local at = SHORT_LEN
    repeat
        if packet:len() - at < LENGTH_LEN then return "bundle_length" end
        local length = packet(at, LENGTH_LEN):uint()
        if length < SHORT_LEN or length > packet:len() - at - LENGTH_LEN then return "bundle_length" end
        local inside = packet(at + LENGTH_LEN, length)
        local kind, first = inside(0, 1):uint(), at == SHORT_LEN
        local same = inside(8, 1):uint() == packet(8, 1):uint()
        if kind ~= 1 and kind ~= 2 and kind ~= 7 or not same or first and inside(8, 4):uint() ~= packet(8, 4):uint() then
            return "bundle_content"
        end
        at = at + LENGTH_LEN + length
    until at == packet:len()
end

-- BUNDLE: each of its packets as if it had come alone, in a tree of its own.
local function bundle(packet, pinfo, root, tree)
    local reason = bundle_refusal(packet)
    if packet:len() >= SHORT_LEN then
        first_bytes(tree, packet)
        add_cid(tree, packet(8, 4))
    end
    if reason then
        refuse(tree, packet(), reason)
        pinfo.cols.info = "BUNDLE [refused: " .. reason .. "]"
        return
    end
    local at, count = SHORT_LEN, 0
    while at < packet:len() do
        local length = packet(at, LENGTH_LEN)
        local inside = packet(at + LENGTH_LEN, length:uint())
        local branch = root:add(bifrost, inside(0, math.min(inside:len(), DATA_LEN)))
        branch:add(f.length, length)
        one(inside:tvb(), pinfo, root, branch)
        at, count = at + LENGTH_LEN + length:uint(), count + 1
    end
    tree:append_text(", BUNDLE, " .. count .. " packets")
    pinfo.cols.info:append(" (the last of " .. count .. " packets)")
end

function bifrost.dissector(buffer, pinfo, root)
    -- VXLAN (RFC 7348): the I flag, the VNI in bytes 4 to 6.
    if buffer:len() < VXLAN_LEN or buffer(0, 1):bitfield(4, 1) == 0 then return 0 end
    pinfo.cols.protocol = "BIFROST"
    local tree = root:add(bifrost, buffer(0, math.min(buffer:len(), VXLAN_LEN + DATA_LEN)))
    tree:add(f.vni, buffer(4, 3))
    if buffer:len() == VXLAN_LEN then
        refuse(tree, buffer(), "short_datagram")
        pinfo.cols.info = "refused: short_datagram"
        return buffer:len()
    end
    local packet = buffer(VXLAN_LEN):tvb()
    local kind = packet(0, 1):uint()
    if kind ~= 1 then tree:set_len(buffer:len()) end
    if kind == 8 then
        bundle(packet, pinfo, root, tree)
    else
        one(packet, pinfo, root, tree)
    end
    return buffer:len()
end

local udp = DissectorTable.get("udp.port")
local port = bifrost.prefs.port
udp:add(port, bifrost)

function bifrost.prefs_changed()
    if bifrost.prefs.port ~= port then
        udp:remove(port, bifrost)
        port = bifrost.prefs.port
        udp:add(port, bifrost)
    end
end
