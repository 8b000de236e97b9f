package evernear;

import io.netty.buffer.Unpooled;
import io.netty.channel.ChannelDuplexHandler;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelPromise;
import io.netty.handler.codec.http.DefaultFullHttpRequest;
import io.netty.handler.codec.http.FullHttpRequest;
import io.netty.handler.codec.http.FullHttpResponse;
import io.netty.handler.codec.http.HttpHeaderNames;
import io.netty.handler.codec.http.HttpMethod;
import io.netty.handler.codec.http.HttpRequest;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.HttpVersion;
import io.netty.util.ReferenceCountUtil;
import java.util.Map;

/**
 * GET /ready, which wants no token: 200 if predictions are answered, by traffic of a moment ago or else by a stored
 * query that takes the way of all others.
 *
 * <p>Under load no query is added, and a queue that is full makes nobody unready whose worker works.
 */
final class Probe extends ChannelDuplexHandler {
    private static final String MODEL = System.getProperty("evernear.model");

    private final Traffic traffic;
    private final byte[] query;
    private boolean asked;

    Probe(Traffic traffic, byte[] query) {
        this.traffic = traffic;
        this.query = query;
    }

    /** Whether this is the probe's question, which has no body. */
    static boolean isAsked(HttpRequest request) {
        return request.uri().equals("/ready")
                && request.method().equals(HttpMethod.GET)
                && HttpUtil.getContentLength(request, 0L) == 0
                && !HttpUtil.isTransferEncodingChunked(request);
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) throws ReflectiveOperationException {
        FullHttpRequest request = (FullHttpRequest) message;
        if (!isAsked(request)) {
            context.fireChannelRead(message);
            return;
        }
        ReferenceCountUtil.release(message);
        if (traffic.isAnswered()) {
            context.writeAndFlush(answer(HttpResponseStatus.OK));
            return;
        }
        FullHttpRequest asking =
                new DefaultFullHttpRequest(
                        HttpVersion.HTTP_1_1, HttpMethod.POST, "/predictions/" + MODEL, Unpooled.wrappedBuffer(query));
        HttpUtil.setContentLength(asking, query.length);
        HttpUtil.setKeepAlive(asking, HttpUtil.isKeepAlive(request));
        if (Token.get() != null) {
            asking.headers().set(HttpHeaderNames.AUTHORIZATION, "Bearer " + Token.get());
        }
        asked = true;
        context.fireChannelRead(asking);
    }

    @Override
    public void write(ChannelHandlerContext context, Object message, ChannelPromise promise) {
        if (asked && message instanceof FullHttpResponse) {
            asked = false;
            HttpResponseStatus status = ((FullHttpResponse) message).status();
            ReferenceCountUtil.release(message);
            if (status.equals(HttpResponseStatus.OK)) {
                traffic.answered();
            }
            context.write(answer(status), promise);
            return;
        }
        context.write(message, promise);
    }

    private static FullHttpResponse answer(HttpResponseStatus status) {
        return status.equals(HttpResponseStatus.OK)
                ? Json.of(status, Map.of("status", "Ready"))
                : Refusal.of(
                        HttpResponseStatus.SERVICE_UNAVAILABLE,
                        "NotReady",
                        "A stored query got " + status + " instead of a prediction.");
    }
}
